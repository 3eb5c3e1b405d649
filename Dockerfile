# The image for `wide launch k8s` and `wide launch compose`: the coordinator and the nodes are the same command, `wide`.
#     docker build -t wiiiiide:0.1.0 .
# Torch from PyPI brings CUDA along; --build-arg PIP_EXTRA_INDEX_URL=URL names an index of CPU builds.
# A job that imports more: FROM wiiiiide:0.1.0, USER root, RUN pip install …, USER 10001:10001.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY wide ./wide
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/wide && /opt/wide/bin/pip install --no-cache-dir --constraint constraints.txt '.[examples]'

FROM python:${PYTHON}-slim
COPY --from=build /opt/wide /opt/wide
# /run/wide holds the run's folder, /home/wide keys and code that can be had again: both are mounted, and so is /tmp, since
# the root is read-only.
RUN useradd --uid 10001 --create-home wide && install -d -o wide -g wide /run/wide /job
ENV PATH=/opt/wide/bin:$PATH HOME=/home/wide PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/wide
ENTRYPOINT ["wide"]
CMD ["--help"]
