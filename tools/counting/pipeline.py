"""How a strategy cuts a model, and the bytes that a rank then holds at least, by formulas."""

import dataclasses

import torch

from common.experts import use_experts
from common.model import MAX_LOGITS, Transformer
from pp import cost_of_head, split_layers
from tools.counting.one_rank import value_of

AGAIN = "--activation-checkpointing"
SIZES = {"bfloat16": (2, 4), "float32": (4, 4), "float64": (8, 8)}  # bytes: in products; a weight


@dataclasses.dataclass
class Strategy:
    """A script with its grid: ``ranks`` data-parallel ranks; a pipeline over ``pp`` ranks."""

    command: str
    ranks: int
    pp: int = 1


class Pipeline:
    """The stages of a strategy on ``n`` ranks, one on each; without a pipeline one on one rank.

    ``layers``: how many each stage has. ``per_place``: how many ranks hold the same stage.
    """

    def __init__(self, strategy, args):
        self.args, self.n = args, strategy.pp
        self.per_place = args.devices // self.n
        self.script, *self.words = strategy.command.split()
        with torch.device("meta"):
            config = dataclasses.replace(args.config, num_hidden_layers=1)
            self.model = use_experts(Transformer(config))
        self.head = self.model.lm_head.weight.numel()  # as many as the embedding has
        self.layers = self.cut(args.config.num_hidden_layers, self.n)

    def cut(self, layers, n):
        """``self.layers`` of a model of ``layers`` on ``n`` ranks."""
        return [len(stage) for stage in split_layers(layers, n, cost_of_head(self.model))]

    def total(self, size, n, place):
        """How many layers a model on ``n`` ranks must have, such that the stage at ``place`` has
        ``size``; None: no number gives it that."""
        for total in range(n, self.args.config.num_hidden_layers + 1):
            if self.cut(total, n)[place] == size:
                return total

    def places(self):
        """The places of which one holds most: the first, which keeps the most activations; the
        last, which has the head; and any that has more layers than all before it."""
        return [place for place, layers in enumerate(self.layers)
                if place in (0, self.n - 1) or layers > max(self.layers[:place])]

    def tokens(self, words):
        """How many tokens of a micro-batch a rank reads."""
        args, (steps, micro_batches) = self.args, accumulated(words)
        ranks = self.per_place // self.tp(words)
        return args.batch_size * args.seq_len // (steps * micro_batches * ranks)

    def tp(self, words):
        return self.args.devices if self.script == "tp.py" else option("--tp", words)

    def numbers(self, place):
        """How many parameters the stage at ``place`` has: in experts, and others, but the last
        norm."""
        layer, layers = self.model.model.layers["0"], self.layers[place]
        ends = (place == 0) + (place == self.n - 1)  # the embedding, the head
        sizes = {name: p.numel() for name, p in layer.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        others = sum(sizes.values()) - experts
        return layers * experts, layers * others + ends * self.head

    def all_numbers(self):
        return sum(sum(self.numbers(place)) for place in range(self.n))

    def least_held(self):
        """Bytes of parameters, gradients and AdamW's two states."""
        _, size = SIZES[self.args.dtype]
        held = 4 * size * self.all_numbers()
        if self.script in ("single.py", "ddp.py", "cp.py"):
            return held
        return held * option("--replicate", self.words) / self.args.devices

    def least_at_peak(self, words, place=0):
        """Bytes when a backward pass begins: parameters and states; what each layer keeps for it;
        gradients of micro-batches before; and either the gradient of the head's weight or a layer
        that is computed again."""
        config, tp, (steps, _) = self.args.config, self.tp(words), accumulated(words)
        size, exact = SIZES[self.args.dtype]
        tokens = self.tokens(words)
        of_layer = tokens // tp * size * kept_by_layer(words, config, tp)
        again = tokens // tp * size * kept_by_layer([], config, tp) - of_layer
        kept, head = self.layers[place] * of_layer, 0
        if place == self.n - 1 and tokens * config.vocab_size > MAX_LOGITS:
            head = self.head / tp  # in chunks: their gradients add up
        if self.n > 1:
            return self.least_in_pipeline(words, place, kept, max(head * exact, again))
        copied = size if size < exact else 0  # of a weight, to be multiplied
        held = self.least_held() * (1 if steps > 1 else 3 / 4)  # without gradients
        if self.script == "zero.py" or "--no-reshard-after-forward" in words:
            held += size * self.all_numbers()  # all are gathered
        return held + kept + max(head * (exact + copied), again)

    def least_in_pipeline(self, words, place, kept, more):
        """The same of a pipeline: also with buffers for what other stages send, and in hybrid_3d.py
        all parameters of the stage gathered. ``kept``: by the layers of the stage for a
        micro-batch; ``more``: when its backward pass begins."""
        size, exact = SIZES[self.args.dtype]
        tp, (steps, micro_batches) = self.tp(words), accumulated(words)
        experts, others = self.numbers(place)
        neighbours = 2 - (place == 0) - (place == self.n - 1)
        hidden = self.tokens(words) // tp * self.args.config.hidden_size
        held = 3 * exact * (experts + others) / self.per_place
        held += micro_batches * neighbours * hidden * size
        numbers = others / tp + experts / option("--ep", words)
        embedding = self.head / tp if place == 0 else 0
        of_embedding = exact * embedding  # its gradient comes last
        if self.script == "hybrid_3d.py":
            held += size * numbers
            of_embedding = size * embedding
        elif size < exact and AGAIN not in words:  # each micro-batch in flight has its own copies
            kept += size * (numbers - embedding)
        in_flight, gradients = min(self.n - place, micro_batches), exact * numbers
        before = gradients
        if micro_batches == in_flight and steps == 1:  # there are none yet
            before, of_embedding = 0, gradients
        others_kept = (in_flight - 1) * kept
        return held + before + others_kept + max(kept + more, of_embedding)


def kept_by_layer(words, config, tp):
    """How many numbers a layer keeps for each token of a rank: its input; with "selective" also
    what products and attention return; without checkpointing, what these, the norms and SwiGLU
    read. Tensor parallelism gathers what a layer's first products read. Experts keep more."""
    D, F = config.hidden_size, config.intermediate_size
    if config.num_experts:
        F = config.expert_size * config.experts_per_token
    Q, KV = (heads * config.head_dim for heads in (
        config.num_attention_heads, config.num_key_value_heads))
    gathered = (tp - 1) * D * (1 if config.num_experts else 2)
    if "selective" in words:
        return 3 * D + 2 * (Q + KV + F) + gathered
    return D if AGAIN in words else 4 * D + 3 * Q + 2 * KV + 4 * F + gathered


def option(name, words):
    """The number that ``words`` give to an option; 1 without it."""
    return int(value_of(name, words) or 1)


def accumulated(words):
    """The accumulation steps among the options ``words``, and the micro-batches of a pipeline."""
    return option("--grad-accum", words), option("--microbatches", words)
