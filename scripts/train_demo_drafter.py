"""How the shipped SmolLM2 drafter was made: prompts -> the target's own answers -> a P-EAGLE drafter.

    python scripts/train_demo_drafter.py respond --prompts prompts.jsonl.gz --out answers.jsonl
    python scripts/train_demo_drafter.py train --answers answers.jsonl --out DIR --minutes 9

One GPU, a few minutes each. Prompts are JSONL rows with a `turns` list, of which the first is asked.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoints.drafter import save_drafter
from peagle.checkpoints.target import load_decoder, load_tokenizer
from peagle.config import DrafterConfig
from peagle.data.responses import looping
from peagle.hub import DEFAULT_TARGET, resolve_target
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training import dense

MASK_TOKEN = "<empty_output>"  # a reserved token that chats never hold
DEPTHS, RATE = 8, 0.8
LONGEST_PROMPT, LONGEST_ANSWER = 192, 256


def respond(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    folder = resolve_target(DEFAULT_TARGET)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device)
    with gzip.open(args.prompts, "rt") as file:
        turns = [json.loads(line)["turns"][0] for line in file]
    chats = [[{"role": "user", "content": turn}] for turn in turns[: args.count * 2]]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = sorted((p for p in ids if len(p) <= LONGEST_PROMPT), key=len)[-args.count :]
    torch.manual_seed(0)
    kept, loops, tokens, started = 0, 0, 0, time.time()
    starts = torch.randperm(-(-len(ids) // args.batch)).tolist()
    with args.out.open("w") as file:
        for start in starts:
            prompts = ids[start * args.batch : (start + 1) * args.batch]
            batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(args.device)
            said = model.generate(
                **batch, do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=LONGEST_ANSWER
            )[:, batch["input_ids"].shape[1] :].tolist()
            for prompt, answer in zip(prompts, said, strict=True):
                ended = tokenizer.eos_token_id in answer
                answer = answer[: answer.index(tokenizer.eos_token_id) + 1] if ended else answer
                if looping(answer, ended):
                    loops += 1
                    continue
                kept, tokens = kept + 1, tokens + len(answer)
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            file.flush()
            speed = tokens / (time.time() - started)
            print(f"{kept} answers, {loops} loops dropped, {speed:.0f} tokens/s", flush=True)


def batches(rows: list[tuple[list[int], list[int]]], budget: int, rng: torch.Generator) -> list[list[int]]:
    """Row numbers of similar length, about `budget` tokens together, in random order."""
    noise = torch.rand(len(rows), generator=rng).tolist()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]) + 16 * noise[i])
    made: list[list[int]] = [[]]
    for i in order:
        length = len(rows[i][0]) + len(rows[i][1])
        if (len(made[-1]) + 1) * length > budget:
            made.append([])
        made[-1].append(i)
    return [made[i] for i in torch.randperm(len(made), generator=rng).tolist()]


def collate(rows: list[tuple[list[int], list[int]]], pad: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] padded behind, and which of them are an answer's."""
    length = max(len(p) + len(a) for p, a in rows)
    tokens = torch.full((len(rows), length), pad)
    asked = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        asked[i, len(prompt) : len(prompt) + len(answer)] = True
    return tokens.to(device), asked.to(device)


def new_drafter(target: Decoder, layers: int, mask_id: int) -> Drafter:
    cfg = target.cfg
    drafter = Drafter(
        DrafterConfig(
            vocab_size=cfg.vocab_size,
            draft_vocab_size=cfg.vocab_size,
            num_layers=layers,
            layer=cfg.layer,
            rope=cfg.rope,
            max_positions=cfg.max_positions,
            target_hidden_size=cfg.layer.hidden_size,
            taps=cfg.default_taps,
            mask_token_id=mask_id,
            fc_norm=True,
        )
    )
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if name == "mask_hidden" else 0.02)
    drafter.norm.weight.data.copy_(target.norm.weight)  # it feeds the target's own head
    return drafter.share(target)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    folder = resolve_target(DEFAULT_TARGET)
    tokenizer = load_tokenizer(folder)
    target = load_decoder(folder, torch.bfloat16, args.device)
    drafter = new_drafter(target, args.layers, tokenizer.convert_tokens_to_ids(MASK_TOKEN)).to(args.device)
    lines = map(json.loads, args.answers.read_text().splitlines())
    rows = [(line["prompt"], line["answer"]) for line in lines]
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    started, step, shown = time.time(), 0, []
    queue: list[list[int]] = []
    while (done := (time.time() - started) / (60 * args.minutes)) < 1:
        queue = queue or batches(rows, args.tokens, rng)
        picked = [rows[i] for i in queue.pop()]
        tokens, asked = collate(picked, tokenizer.pad_token_id, args.device)
        chosen = dense.nested_rows(tokens.shape[1], DEPTHS, RATE, rng)
        chosen = dense.Rows(chosen.anchor_R.to(args.device), chosen.depth_R.to(args.device))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(args.device, torch.bfloat16):
            loss = dense.loss(drafter, target, tokens, chosen, asked)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        step += 1
        shown.append(loss.detach())
        if step % 200 == 0:
            print(f"step {step}  loss {torch.stack(shown).mean():.3f}  {100 * done:.0f}% of the time", flush=True)
            shown = []
    save_drafter(drafter.to(torch.bfloat16), args.out)
    print(json.dumps({"steps": step, "answers": len(rows), "minutes": args.minutes, "layers": args.layers}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    ask = verbs.add_parser("respond")
    ask.set_defaults(run=respond)
    ask.add_argument("--prompts", type=Path, required=True)
    ask.add_argument("--count", type=int, default=24000)
    ask.add_argument("--batch", type=int, default=1024)
    learn = verbs.add_parser("train")
    learn.set_defaults(run=train)
    learn.add_argument("--answers", type=Path, required=True)
    learn.add_argument("--layers", type=int, default=1)
    learn.add_argument("--minutes", type=float, default=9.0)
    learn.add_argument("--tokens", type=int, default=8192, help="of a batch, before depths multiply them")
    learn.add_argument("--lr", type=float, default=1e-3)
    for verb in (ask, learn):
        verb.add_argument("--out", type=Path, required=True)
        verb.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
