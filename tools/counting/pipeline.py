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
        self.size, self.exact = SIZES[args.dtype]
        number = args.config.num_hidden_layers
        with torch.device("meta"):
            config = dataclasses.replace(args.config, num_hidden_layers=1)
            self.model = use_experts(Transformer(config))
        # How many parameters the head has, or the embedding; the experts of a layer; the rest of
        # a layer; the model. The last norm is left out.
        self.head = self.model.lm_head.weight.numel()
        sizes = {name: p.numel() for name, p in self.model.model.layers["0"].named_parameters()}
        self.experts = sum(size for name, size in sizes.items() if ".experts." in name)
        self.others = sum(sizes.values()) - self.experts
        self.all = number * sum(sizes.values()) + 2 * self.head
        self.layers = self.cut(number, self.n)

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

    def least_held(self):
        """Bytes of parameters, gradients and AdamW's two states."""
        held = 4 * self.exact * self.all
        if self.script in ("single.py", "ddp.py", "cp.py"):
            return held
        return held * option("--replicate", self.words) / self.args.devices

    def least_at_peak(self, words, place=0):
        """Bytes when a backward pass begins: parameters and states; what each layer keeps for it;
        gradients of micro-batches before; and either the gradient of the head's weight or a layer
        that is computed again."""
        config, tp, (steps, _) = self.args.config, self.tp(words), accumulated(words)
        tokens = self.tokens(words)
        of_number = tokens // tp * self.size  # that is kept for each token
        of_layer = of_number * kept_by_layer(words, config, tp)
        more = of_number * kept_by_layer([], config, tp) - of_layer
        copied = self.size if self.size < self.exact else 0  # of a weight, to be multiplied
        if place == self.n - 1 and tokens * config.vocab_size > MAX_LOGITS:
            of_head = self.exact + (copied if self.n == 1 else 0)
            more = max(more, self.head / tp * of_head)  # in chunks: their gradients add up
        kept = self.layers[place] * of_layer
        if self.n > 1:
            return self.least_in_pipeline(words, place, kept, more)
        held = self.least_held() * (1 if steps > 1 else 3 / 4)  # without gradients
        if self.script == "zero.py" or "--no-reshard-after-forward" in words:
            held += self.size * self.all  # all are gathered
        return held + kept + more

    def least_in_pipeline(self, words, place, kept, more):
        """The same of a pipeline: also with buffers for what other stages send, and in hybrid_3d.py
        all parameters of the stage gathered. ``kept``: by the layers of the stage for a
        micro-batch; ``more``: when its backward pass begins."""
        tp, (steps, micro_batches) = self.tp(words), accumulated(words)
        ends = (place == 0) + (place == self.n - 1)  # the embedding, the head
        experts = self.layers[place] * self.experts
        others = self.layers[place] * self.others + ends * self.head
        held = 3 * self.exact * (experts + others) / self.per_place
        hidden = self.tokens(words) // tp * self.args.config.hidden_size
        held += micro_batches * (2 - ends) * hidden * self.size  # of two neighbours, or one
        numbers = others / tp + experts / option("--ep", words)
        embedding = self.head / tp if place == 0 else 0
        of_embedding = self.exact * embedding  # its gradient comes last
        if self.script == "hybrid_3d.py":
            held += self.size * numbers
            of_embedding = self.size * embedding
        elif self.size < self.exact and AGAIN not in words:
            kept += self.size * (numbers - embedding)  # each micro-batch in flight has its copies
        in_flight, gradients = min(self.n - place, micro_batches), self.exact * numbers
        before = gradients
        if micro_batches == in_flight and steps == 1:  # there are none yet
            before, of_embedding = 0, gradients
        return held + before + (in_flight - 1) * kept + max(kept + more, of_embedding)


def kept_by_layer(words, config, tp):
    """How many numbers a layer keeps for each token of a rank: its input; with "selective" also
    what products and attention return; without checkpointing, what these, the norms and SwiGLU
    read. Tensor parallelism gathers what a layer's first products read. Experts keep more."""
    D = config.hidden_size
    Q = config.num_attention_heads * config.head_dim
    KV = config.num_key_value_heads * config.head_dim
    F, gathered = config.intermediate_size, 2 * (tp - 1) * D
    if config.num_experts:
        F, gathered = config.expert_size * config.experts_per_token, (tp - 1) * D
    if "selective" in words:
        return 3 * D + 2 * (Q + KV + F) + gathered
    return D if AGAIN in words else 4 * D + 3 * Q + 2 * KV + 4 * F + gathered


def option(name, words):
    """The number that ``words`` give to an option; 1 without it."""
    return int(value_of(name, words) or 1)


def accumulated(words):
    """The accumulation steps among the options ``words``, and the micro-batches of a pipeline."""
    return option("--grad-accum", words), option("--microbatches", words)
