"""What `wide launch` writes for Kubernetes and compose, read by programs that are not ours: kubernetes-validate, PyYAML."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.processes import ROOT, wide

PYTHON = ROOT / ".engines" / "kubernetes" / "bin" / "python"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not PYTHON.exists(), reason="no kubernetes-validate: make .engines/kubernetes/ready"),
]
LOAD = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1], encoding='utf-8')))))"
EVIL = """it's "a": $HOME $(id) {{name}} \\ # – 😀: - &c"""
SECURE = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A job with an odd name, a module in a package, a file that is no UTF-8, and arguments that want to do harm."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "bits").mkdir()
    (folder / "bits" / "__init__.py").write_text("")
    (folder / "bits" / "odd.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (folder / "bits" / "even.py").write_text("  # begins with spaces\n\n\nname = '\t\\u2028'   \n\n")
    job = (ROOT / "examples" / "digits.py").read_text()
    (folder / "My Job #1.py").write_text(f"import bits.odd, bits.even\n{job}")
    for kind in ("k8s", "compose"):
        words = ("--nodes", 7, "--cpus-per-node", 2, "--gpus-per-node", 1, "--image", EVIL)
        code, _, err = wide("launch", kind, "My Job #1.py", *words, "--out", kind, "--", EVIL, cwd=folder)
        assert code == 0, err
    return folder


def read(file):
    done = subprocess.run([PYTHON, "-c", LOAD, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def validate(*files):
    command = PYTHON.with_name("kubernetes-validate")
    return subprocess.run([command, "--strict", *files], capture_output=True, text=True)


def test_kubernetes_takes_the_manifests_and_refuses_a_typo(folder, tmp_path):
    files = sorted((folder / "k8s").glob("*.yaml"))
    done = validate(*files)
    assert (done.returncode, (done.stdout + done.stderr).count("passed for resource")) == (0, 7), done.stderr
    (tmp_path / "typo.yaml").write_text(
        (folder / "k8s" / "pool.yaml").read_text().replace("parallelism:", "paralelism:")
    )
    done = validate(tmp_path / "typo.yaml")
    assert done.returncode != 0
    assert "'paralelism' was unexpected" in done.stdout + done.stderr


def test_nodes_are_a_job_that_ends_with_the_run_and_heeds_exit_codes(folder):
    *_, coordinator, nodes = read(folder / "k8s" / "pool.yaml")
    assert nodes["spec"]["parallelism"] == 7
    assert "completions" not in nodes["spec"]
    rules = nodes["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[1]["onExitCodes"]["values"] == [2, 76, 77]
    (node,) = nodes["spec"]["template"]["spec"]["containers"]
    assert node["name"] == rules[1]["onExitCodes"]["containerName"]
    assert node["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert coordinator["spec"]["template"]["spec"]["containers"][0]["args"][-1] == EVIL.replace("$", "$$")


@pytest.mark.parametrize("number", [-2, -1])
def test_no_pod_is_root_or_writes_to_its_image_or_speaks_to_kubernetes(folder, number):
    pod = read(folder / "k8s" / "pool.yaml")[number]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == SECURE
    mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    written = {name for name, mount in mounted.items() if not mount.get("readOnly")}
    assert written == ({"run", "home", "tmp"} if number == -2 else {"home", "tmp"})


def test_what_belongs_together_has_one_name(folder):
    service, claim, code, coordinator, nodes = read(folder / "k8s" / "pool.yaml")
    keys, invite = read(folder / "k8s" / "secrets.yaml")
    pod = coordinator["spec"]["template"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == keys["metadata"]["name"]
    assert volumes["run"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["code"]["configMap"]["name"] == code["metadata"]["name"]
    assert nodes["spec"]["template"]["spec"]["volumes"][0]["secret"]["secretName"] == invite["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= nodes["spec"]["template"]["metadata"]["labels"].items()
    args = pod["spec"]["containers"][0]["args"]
    assert args[args.index("--address") + 1] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert set(invite["stringData"]) == {"invite"}  # a node cannot take the coordinator's place
    assert invite["stringData"]["invite"] == keys["stringData"]["invite"]


def test_the_code_arrives_as_it_was(folder):
    import base64

    _, _, code, coordinator, _ = read(folder / "k8s" / "pool.yaml")
    (items,) = [v["configMap"]["items"] for v in coordinator["spec"]["template"]["spec"]["volumes"] if "configMap" in v]
    texts = {key: text.encode() for key, text in code["data"].items()}
    texts |= {key: base64.b64decode(text) for key, text in code.get("binaryData", {}).items()}
    found = {item["path"]: texts[item["key"]] for item in items}
    assert found == {name: (folder / name).read_bytes() for name in found}
    assert set(found) == {"My Job #1.py", "bits/__init__.py", "bits/odd.py", "bits/even.py"}


def test_compose_starts_one_coordinator_and_as_many_nodes_as_asked(folder):
    (compose,) = read(folder / "compose" / "compose.yaml")
    coordinator, node = compose["services"]["coordinator"], compose["services"]["node"]
    assert node["deploy"]["replicas"] == 7
    assert node["deploy"]["resources"]["limits"]["cpus"] == "2"
    assert node["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1
    assert coordinator["command"][-1] == EVIL.replace("$", "$$")
    assert node["image"] == EVIL.replace("$", "$$")
    for service in (coordinator, node):
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert not service["user"].startswith("0:")
    assert [volume["source"] for volume in node["volumes"]] == ["./keys/invite"]
    for volume in coordinator["volumes"] + node["volumes"]:
        assert (folder / "compose" / volume["source"]).exists()
