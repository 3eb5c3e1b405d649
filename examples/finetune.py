"""Fine-tuning with transformers.Trainer, in a pool: Python's own library, byte by byte. No download, of nothing.

Everything until the last lines is an ordinary script for the Trainer; instead of `trainer.train()` it says `wide.run`.
Needs `pip install 'wiiiiide[hf]'`.
"""

import os
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import wide

CONTEXT, WIDTH, LAYERS = 96, 128, 2
BYTES = 256


class Windows(torch.utils.data.Dataset):
    """Pieces of text as a causal language model wants them: labels are the inputs, the model shifts them."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = torch.tensor(list(self.text[i * CONTEXT : (i + 1) * CONTEXT]))
        return {"input_ids": window, "labels": window}


def library(most: int) -> bytes:
    """Modules of the standard library, in alphabetical order."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= most:
            break
    return text[:most]


def trainer() -> Trainer:
    text = library(300_000)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=BYTES,
            n_positions=CONTEXT,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(
        "runs/finetune",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=60,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(text[:-30_000]),
        eval_dataset=Windows(text[-30_000:]),
    )


if __name__ == "__main__":
    fine = trainer()
    result = wide.run(wide.hf.job(fine), nodes=min(2, os.cpu_count() or 1))
    for row in fine.state.log_history:
        print({name: round(value, 4) for name, value in row.items()})
    fine.save_model("runs/finetune")
    print(f"saved in runs/finetune; weights {result.weights_sha256[:12]}…")
