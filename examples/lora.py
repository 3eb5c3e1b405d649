"""LoRA in a pool: what is frozen travels once, and after that only the adapters do. No download, of nothing.

The base is a small GPT with random weights; with a real one only `base()` changes. Needs
`pip install 'wiiiiide[hf]' peft`.
"""

import os

from finetune import BYTES, CONTEXT, Windows, library
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import wide


def base() -> GPT2LMHeadModel:
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=BYTES, n_positions=CONTEXT, n_embd=192, n_layer=4, n_head=4, **ids))


def trainer() -> Trainer:
    adapters = LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM")
    arguments = TrainingArguments(
        "runs/lora",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        model=get_peft_model(base(), adapters),
        args=arguments,
        train_dataset=Windows(library(200_000)),
    )


if __name__ == "__main__":
    fine = trainer()
    sizes = [parameter.nbytes for parameter in fine.model.parameters() if parameter.requires_grad]
    whole = sum(parameter.nbytes for parameter in fine.model.parameters())
    print(f"an update is {sum(sizes) / 1e6:.2f} MB of adapters; the model is {whole / 1e6:.2f} MB, and travels once")
    result = wide.run(wide.hf.job(fine), nodes=min(2, os.cpu_count() or 1))
    for row in fine.state.log_history:
        print({name: round(value, 4) for name, value in row.items()})
    fine.save_model("runs/lora")  # the adapters alone, as ever
    print(f"saved in runs/lora; weights {result.weights_sha256[:12]}…")
