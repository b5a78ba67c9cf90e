"""Trains the small story model that the package ships as ``llorch_worker/assets/demo.gguf``.

    python tools/train_demo_model.py --out llorch_worker/assets/demo.gguf --seed 0

It generates stories with ``story_grammar``, trains a sentencepiece-style BPE vocabulary on them and
a Llama-2 of about 1.4 million parameters in plain torch, and writes a Q8_0 GGUF file with the keys
and tensor names of llama.cpp's converter. The same seed, steps and thread count give the same file
on the same machine with the same libraries.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from make_model import Shape, add_shape, add_vocabulary
from story_grammar import stories
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

SPACE = "\u2581"
UNK, BOS, EOS, FIRST_BYTE, FIRST_PIECE = 0, 1, 2, 3, 259
# A piece is part of a word with the space before it, or of a run of other characters.
WORDS = re.compile(rf"{SPACE}?[A-Za-z']+|{SPACE}?[^A-Za-z'{SPACE}\n]+|{SPACE}|\n")
VOCAB_STORIES = 4000
PROMPTS = (
    "Once upon a time", "One day", "There was", "In the", "A little", "The dragon", "Lily",
    "Long ago", "The robot", "Tom and", "It was a", "Every night", "When the", "A tiny snail",
    "The king", "High on",
)  # fmt: skip


SHAPE = Shape(1536, 128, 384, 5, 4, 2, context_tokens=512)
"""Every row length is a multiple of 32, the block of Q8_0."""


class Vocabulary:
    """Llama's layout of pieces: special, bytes, merges by rank, single characters last."""

    def __init__(self, merged: list[str], characters: list[str]) -> None:
        """``merged``: pieces in the order of merging; ``characters``: what they are made of."""
        self.pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
        self.pieces += merged + characters
        ranks = range(len(merged) + len(characters))
        self.scores = [0.0] * FIRST_PIECE + [-float(rank) for rank in ranks]
        normal = gguf.TokenType.NORMAL
        self.types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        self.types += [gguf.TokenType.BYTE] * 256 + [normal] * len(ranks)
        self.ids = {p: i for i, p in enumerate(self.pieces) if i >= FIRST_PIECE}
        self._seen: dict[str, list[int]] = {}

    @classmethod
    def train(cls, texts: list[str], size: int) -> Vocabulary:
        """A vocabulary of exactly ``size`` pieces from ``texts``."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS.pattern), "isolated")
        trainer = trainers.BpeTrainer(vocab_size=size - FIRST_PIECE, show_progress=False)
        lines = (line for text in texts for line in spaced(text).split("\n") if line)
        tokenizer.train_from_iterator(lines, trainer)
        by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        vocabulary = cls(
            [p for p, _ in by_id if len(p) > 1], sorted(p for p, _ in by_id if len(p) == 1)
        )
        if len(vocabulary.pieces) != size:
            raise ValueError(f"the corpus gives {len(vocabulary.pieces)} pieces, not {size}")
        return vocabulary

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` without <s>, as sentencepiece's BPE gives them."""
        return [i for word in WORDS.findall(spaced(text)) for i in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        """Merge the best-scored adjacent pair until none is left; bytes for unknown characters."""
        if word not in self._seen:
            parts = list(word)
            while pairs := [
                (-self.scores[self.ids[a + b]], at)
                for at, (a, b) in enumerate(pairwise(parts))
                if a + b in self.ids
            ]:
                at = min(pairs)[1]
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids: list[int] = []
            for part in parts:
                known = self.ids.get(part)
                ids += [FIRST_BYTE + b for b in part.encode()] if known is None else [known]
            self._seen[word] = ids
        return self._seen[word]

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids`` without special ones."""
        data = b"".join(
            bytes([i - FIRST_BYTE]) if i < FIRST_PIECE else self.pieces[i].encode()
            for i in ids
            if i >= FIRST_BYTE
        )
        return data.decode(errors="replace").replace(SPACE, " ").removeprefix(" ")


def spaced(text: str) -> str:
    """``text`` with Llama's dummy prefix and visible spaces; nothing for nothing."""
    return SPACE + text.replace(" ", SPACE) if text else ""


def rope_table(config: Shape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each ``[length, head_dim / 2]``."""
    inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent pairs, as GGUF stores Q and K: ``x: [batch, heads, tokens, head_dim]``."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    """One Llama layer: attention, then SwiGLU, each behind its RMS norm and added to the stream."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.c = c
        self.attn_norm = nn.RMSNorm(c.hidden, c.rms_eps)
        self.attn_q = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(c.hidden, c.rms_eps)
        self.ffn_gate = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.ffn_up = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.ffn_down = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x: [batch, tokens, hidden]`` to the same shape."""
        batch, tokens, _ = x.shape
        h = self.attn_norm(x)

        def by_head(linear: nn.Linear, heads: int) -> Tensor:
            return linear(h).view(batch, tokens, heads, self.c.head_dim).transpose(1, 2)

        q = rotate(by_head(self.attn_q, self.c.heads), cos, sin)
        k = rotate(by_head(self.attn_k, self.c.kv_heads), cos, sin)
        v = by_head(self.attn_v, self.c.kv_heads)
        group = self.c.heads // self.c.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class DemoLlama(nn.Module):
    """The whole model; parameters carry their GGUF names."""

    def __init__(self, c: Shape) -> None:
        super().__init__()
        self.c = c
        self.token_embd = nn.Embedding(c.vocab, c.hidden)
        self.blk = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.output_norm = nn.RMSNorm(c.hidden, c.rms_eps)
        self.output = nn.Linear(c.hidden, c.vocab, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rope_table(c, c.context_tokens)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.03 / math.sqrt(2 * c.layers) if deep else 0.03)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids: [batch, tokens]`` to logits ``[batch, tokens, vocab]``."""
        x = self.token_embd(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blk:
            x = block(x, cos, sin)
        return self.output(self.output_norm(x))


@torch.no_grad()
def generate(model: DemoLlama, ids: list[int], max_tokens: int = 256) -> list[int]:
    """Greedy ids after ``ids`` up to </s>, without a cache: for checks only."""
    row = list(ids)
    while len(row) < len(ids) + max_tokens:
        logits = model(torch.tensor([row[-model.c.context_tokens :]]))[0, -1]
        row.append(int(logits.argmax()))
        if row[-1] == EOS:
            break
    return row[len(ids) :]


def train(model: DemoLlama, data: Tensor, args: argparse.Namespace) -> float:
    """Fit ``model`` to windows of ``data``; return the mean loss of the last 50 steps.

    Every window starts with a story, as every prompt does, so that the opening is always in sight
    and later names and pronouns can be learnt from it. The next story follows in the same window.
    Muon trains the blocks' matrices, AdamW the rest.
    """
    inner = [p for p in model.blk.parameters() if p.dim() == 2]
    ends = [p for p in model.parameters() if not any(p is q for q in inner)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=args.muon_lr, weight_decay=0.1),
        torch.optim.AdamW(ends, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    peaks = [args.muon_lr, args.lr]
    window = torch.arange(args.sequence_tokens + 1)
    starts = (data[: -len(window)] == BOS).nonzero()
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(args.seed))
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(args.steps):
        progress = step / args.steps
        scale = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        picks = torch.arange(step * args.batch, (step + 1) * args.batch) % len(order)
        at = starts[order[picks]]  # [batch, 1]
        rows = data[at + window]
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            spent_s = time.perf_counter() - start
            rate = (step + 1) * args.batch * args.sequence_tokens / spent_s
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(
                f"step {step + 1:5d}  loss {mean:.4f}  {spent_s:6.0f} s  {rate:.0f} tokens/s",
                flush=True,
            )
    return sum(losses[-50:]) / len(losses[-50:])


def corpus(vocabulary: Vocabulary, seed: int, tokens: int) -> Tensor:
    """At least ``tokens`` ids of stories, each as <s> ... </s>, concatenated."""
    ids: list[int] = []
    part = 0
    while len(ids) < tokens:
        part += 1
        for told in stories(seed * 100_003 + part, 1000):
            ids += [BOS, *vocabulary.encode(told.text), EOS]
    return torch.tensor(ids)


def save(path: Path, model: DemoLlama, vocabulary: Vocabulary) -> None:
    """Write ``model`` as GGUF: Q8_0 for matrices, float32 for norms."""
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, "llorch-demo", model.c)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, vocabulary.pieces, vocabulary.scores, vocabulary.types)
    for name, weight in model.named_parameters():
        values = weight.detach().numpy().astype(np.float32)
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_weights(path: Path, model: DemoLlama) -> None:
    """Fill ``model`` with the dequantised tensors of the file at ``path``."""
    state = {
        t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type)))
        for t in gguf.GGUFReader(path).tensors
    }
    model.load_state_dict(state)


def main() -> None:
    """Train, write, read back and print what the written model generates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("llorch_worker/assets/demo.gguf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--sequence-tokens", type=int, default=256)
    parser.add_argument("--lr", type=float, default=4e-3, help="of embeddings, output, norms")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="of the blocks' matrices")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    vocabulary = Vocabulary.train([s.text for s in stories(args.seed, VOCAB_STORIES)], SHAPE.vocab)
    data = corpus(vocabulary, args.seed + 1, args.steps * args.batch * args.sequence_tokens)
    model = DemoLlama(SHAPE)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(data):,} tokens of stories", flush=True)
    start = time.perf_counter()
    loss = train(model, data, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(args.out, model, vocabulary)
    size_bytes = args.out.stat().st_size
    print(f"loss {loss:.4f} after {time.perf_counter() - start:.0f} s; {size_bytes:,} bytes")
    load_weights(args.out, model)
    for prompt in PROMPTS:
        ids = [BOS, *vocabulary.encode(prompt)]
        print(f"--- {prompt}\n{vocabulary.decode(ids + generate(model, ids))}")


if __name__ == "__main__":
    main()
