"""A trainer with accelerate, a Llama of transformers and the two lines of tools/parity: with DDP
and with FSDP2, on two processes, it is the run of one.

    python -m examples.parity_accelerate one.parity
    torchrun --nproc_per_node=2 -m examples.parity_accelerate ddp.parity
    torchrun --nproc_per_node=2 -m examples.parity_accelerate fsdp.parity --fsdp
    python -m tools.parity one.parity ddp.parity
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tools.parity import Parity

STEPS, BATCH, ACCUMULATE, T = 5, 12, 3, 16


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args(argv)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"]) if args.fsdp else None
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATE,
                              cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randint(64, (STEPS * BATCH, T), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows],
                        batch_size=BATCH // ACCUMULATE // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    parity = Parity(args.path, model, optimizer)

    step, batch, losses = 0, [], []
    for micro_batch in loader:
        with accelerator.accumulate(model):
            loss = model(**micro_batch).loss
            accelerator.backward(loss)
            batch.append(micro_batch)
            losses.append(loss.detach() / ACCUMULATE)
            if accelerator.sync_gradients:
                parity.record(step, losses, batch)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                step, batch, losses = step + 1, [], []
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
