"""Small trainers of several kinds, with random weights and data that is made here."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

WORDS = 64


class Padding:
    """Texts of unequal length to one batch; what is padded has no label."""

    def __call__(self, samples):
        longest = max(len(sample["input_ids"]) for sample in samples)

        def padded(name, filling):
            return torch.tensor([[*sample[name], *[filling] * (longest - len(sample[name]))] for sample in samples])

        mask = [{"mask": [1] * len(sample["input_ids"])} for sample in samples]
        batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
        return batch | {
            "attention_mask": torch.tensor([one["mask"] + [0] * (longest - len(one["mask"])) for one in mask])
        }


def texts(count=90):
    rows = [[(3 * j + i) % WORDS for j in range(3 + i % 14)] for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def gpt(seed=3, dropout=0.0, width=32):
    torch.manual_seed(seed)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=width, n_layer=2, n_head=2, **drops, **ids)
    )


def llama():
    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **size))


def arguments(folder, **more):
    usual = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "max_steps": 12,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **(usual | more))


def writer(folder, kind=Trainer, data=None, model=None, given=None, **more):
    """Padded text, GPT-2; weights that decay and weights that do not."""
    data = texts() if data is None else data
    usual = {
        "model": model or gpt(),
        "args": arguments(folder, **more),
        "train_dataset": data,
        "data_collator": Padding(),
    }
    return kind(**(usual | (given or {})))


def classifier(folder, kind=Trainer, labels=3, given=None, **more):
    """Sentences to classes, by BERT; accuracy after each epoch."""
    torch.manual_seed(3)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=labels, **small, **drops))
    rows = [{"input_ids": [(7 * i + j) % WORDS for j in range(8)], "labels": i % labels} for i in range(50)]
    usual = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    args = arguments(folder, **(usual | best | more))
    data = {"train_dataset": rows, "eval_dataset": rows[:20], "compute_metrics": accuracy}
    return kind(**({"model": model, "args": args} | data | (given or {})))


def accuracy(said):
    return {"accuracy": float((said.predictions.argmax(-1) == said.label_ids).mean())}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM"))
