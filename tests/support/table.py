"""The table of runs: each is started once, and all tests that claim something of it share it.

Every run has the same model, data and options, so that any can resume what any other saved. In each
sample some targets are ignored. A checkpoint is saved after step 2, and at the end, after step 3,
in which bytes are counted. Held-out data is evaluated after step 3; by zero.py and by FSDP after
each step, which must leave nothing gathered for the next. Then each of ``EXACT`` resumes from its
own step 2, in the same processes: it trains step 3 again, and evaluates.
"""

import dataclasses

# 5 layers, embedding and head are 7 loads: no number of stages divides them. 3 ranks do not divide
# the rows of a matrix, 2 and 4 ranks do.
MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 5 --num-attention-heads 8 "
         "--num-key-value-heads 4")
TRAINING = (f"{MODEL} --seq-len 24 --batch-size 24 --steps 3 --log-every 1 --warmup-steps 1 "
            "--lr 0.01 --save-every 2 --seed 3")
OPTIONS = f"{TRAINING} --val-data {{val}} --val-every 3 --val-batches 1"
AGAIN, SELECTIVE = "--activation-checkpointing", "--activation-checkpointing selective"


@dataclasses.dataclass(frozen=True)
class Row:
    command: str
    world: int  # processes; 0: plain python
    dtype: str = "float64"
    inject: str = "write_counts(); ignored(); in_mode()"

    @property
    def script(self):
        return self.command.split()[0]

    @property
    def name(self):
        words = self.command.replace(".py", "").replace(" --", "-").replace(" ", "")
        chunks = "-in-chunks" if "chunks" in self.inject else ""
        return f"{words}{chunks}-{self.dtype}-on-{self.world}"

    def option(self, name, otherwise=1):
        value = self.command.partition(f"{name} ")[2].split()[:1]
        return type(otherwise)(*value) if value else otherwise

    def run(self, once):
        inject = f"{self.inject}; resumed([])" if self in EXACT else self.inject
        options = f"{OPTIONS} --dtype {self.dtype}"
        if self.script in ("zero.py", "fsdp.py", "hybrid_3d.py"):
            options += " --val-every 1"
        return once(self.command, self.world, options, inject=inject)


CHUNKS = f"{Row.inject}; loss_in_chunks()"
# Without --all: at least one row of each script, on as few ranks as show it
SAMPLE_EXACT = [Row(command, world) for command, world in [
    ("single.py", 0),
    (f"single.py --grad-accum 4 --workers 1 {SELECTIVE}", 0),
    ("zero.py --stage 1 --grad-accum 2", 3),
    (f"zero.py --stage 2 --grad-accum 2 --workers 1 {AGAIN}", 2),
    (f"fsdp.py --grad-accum 2 --workers 1 {AGAIN}", 2),
    (f"fsdp.py --no-reshard-after-forward --grad-accum 2 {SELECTIVE}", 2),
    ("fsdp.py --replicate 2 --grad-accum 2", 4),
    (f"tp.py --no-sequence-parallel --grad-accum 2 {AGAIN}", 2),
    (f"cp.py --attention ring --grad-accum 2 {AGAIN}", 2),
    (f"cp.py --attention ulysses --grad-accum 2 {AGAIN}", 2),
    # How the batch is cut: 3 is no multiple of 2, 4 is none of 3, and 6 is none of 4
    ("pp.py --schedule gpipe --grad-accum 2 --microbatches 3", 2),
    ("hybrid_3d.py --tp 2 --pp 2 --microbatches 2", 4),
    ("hybrid_3d.py --replicate 2 --grad-accum 2", 2),
]] + [Row(command, world, inject=CHUNKS) for command, world in [
    ("ddp.py --grad-accum 2", 4),  # two ranks add up alike in any buckets
    (f"tp.py {AGAIN}", 2),
    ("pp.py --schedule zbv --microbatches 2", 2),
    (f"cp.py --attention allgather {SELECTIVE}", 3),
]]
EXACT = SAMPLE_EXACT + [Row(command, world) for command, world in [
    ("ddp.py --grad-accum 2", 0),
    ("ddp.py --deterministic", 2),
    (f"ddp.py --grad-accum 3 {SELECTIVE}", 4),
    (f"zero.py --stage 1 {SELECTIVE}", 4),
    ("zero.py --stage 2", 1),
    ("fsdp.py", 1),
    ("fsdp.py", 2),
    ("fsdp.py --grad-accum 2", 3),
    ("fsdp.py --replicate 3 --grad-accum 2", 3),
    ("tp.py --grad-accum 2", 1),
    (f"tp.py {SELECTIVE}", 4),
    ("cp.py --attention ring", 1),
    (f"cp.py --attention ring {SELECTIVE}", 3),
    (f"cp.py --attention ulysses {SELECTIVE}", 4),
    (f"cp.py --attention allgather --grad-accum 2 {AGAIN}", 3),
    (f"pp.py --schedule 1f1b --grad-accum 2 --microbatches 6 {SELECTIVE}", 4),
    ("pp.py --schedule interleaved1f1b --microbatches 6", 3),
    ("pp.py --schedule loopedbfs --stages-per-rank 3 --grad-accum 2 --microbatches 3", 2),
    ("pp.py --schedule zerobubble --stages-per-rank 1 --microbatches 4 --workers 1", 3),
    ("pp.py --schedule zbv", 1),
    ("pp.py --schedule zbv --grad-accum 2 --microbatches 4", 3),
    ("pp.py --schedule dualpipev --grad-accum 2 --microbatches 6", 2),
    ("hybrid_3d.py --grad-accum 3", 1),
    ("hybrid_3d.py --dp 2 --cp 2 --microbatches 2", 4),
    ("hybrid_3d.py --dp 2 --tp 2", 4),
    ("hybrid_3d.py --dp 2 --pp 2 --grad-accum 2", 4),
    (f"hybrid_3d.py --cp 2 --tp 2 {SELECTIVE} --deterministic", 4),
    ("hybrid_3d.py --tp 2 --pp 2 --no-sequence-parallel --microbatches 3", 4),
    ("hybrid_3d.py --replicate 2 --cp 2 --pp 2", 8),
    ("hybrid_3d.py --tp 2 --cp 2 --pp 4", 16),
]] + [Row(command, world, inject=CHUNKS) for command, world in [
    (f"single.py {AGAIN}", 0), ("zero.py --stage 2", 3), ("fsdp.py --grad-accum 2", 4),
]]
# float32: rounding error, which grows during training; bfloat16: a small part of the loss
SAMPLE_LOOSE = [Row("fsdp.py", 2, "bfloat16"), Row("pp.py --schedule zbv", 2, "bfloat16")]
LOOSE = SAMPLE_LOOSE + [Row(command, world, "float32") for command, world in [
    ("single.py", 0), ("fsdp.py --grad-accum 2", 4), ("pp.py --schedule zerobubble", 2),
    ("hybrid_3d.py --tp 2 --cp 2", 4),
]] + [Row(command, world, "bfloat16") for command, world in [
    ("single.py", 0), ("ddp.py", 2), ("zero.py", 2),
    (f"tp.py --no-sequence-parallel {AGAIN}", 2), (f"tp.py --grad-accum 2 {AGAIN}", 2),
    ("cp.py", 2), ("cp.py --attention ulysses", 2), ("cp.py --attention allgather", 2),
    ("hybrid_3d.py --tp 2 --pp 2", 4),
]]
COMPILED = [Row(f"{command} --compile", world,
                inject=f"write_counts(); ignored(); count_compiled('{backend}')")
            for command, world, backend in [
    # The first one compiles kernels, which takes minutes. The others stop at the graphs.
    ("single.py", 0, "inductor"), (f"ddp.py {AGAIN}", 2, "aot_eager"),
    (f"zero.py {AGAIN}", 2, "aot_eager"), (f"fsdp.py {SELECTIVE}", 2, "aot_eager"),
    (f"tp.py --grad-accum 2 {AGAIN}", 2, "aot_eager"), ("cp.py", 2, "aot_eager"),
    (f"pp.py --schedule interleaved1f1b --microbatches 2 {AGAIN}", 2, "aot_eager"),
    (f"hybrid_3d.py --tp 2 {SELECTIVE}", 2, "aot_eager"),
]]
ROWS = EXACT + LOOSE + COMPILED
SAMPLE = SAMPLE_EXACT + SAMPLE_LOOSE
