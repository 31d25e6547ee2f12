"""Small faults, planted one at a time in a copy of the repository: how many of them do the tests
notice? A fault that lives is a missing test.

    python -m tests.support.mutants          # all of them, one after the other: 40 minutes or more
    python -m tests.support.mutants 3 17     # these numbers

Each runs the default sample of the test files that somebody would run after a change of that file.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 300  # for the tests of one fault; if they take longer, it counts as noticed
SCRIPTS = ("zero.py", "fsdp.py", "tp.py", "cp.py", "pp.py", "hybrid_3d.py")


class Mutant(typing.NamedTuple):
    path: str
    old: str  # occurs once in the file
    new: str
    tests: str  # names of test files, without test_ and .py
    why: str  # what is wrong then


MUTANTS = [Mutant(*row) for row in [
    # Loops and strategies of the scripts
    ("single.py", "(inputs, targets) / count", "(inputs, targets) / count / args.grad_accum",
     "same_run", "accumulated gradients are divided twice"),
    ("zero.py", "(micro_loss * n).backward()", "micro_loss.backward()",
     "same_run", "gradients are 1/n of those of one process"),
    ("zero.py", "count_targets(batch, dist.group.WORLD)", "count_targets(batch)",
     "same_run", "each rank divides by its own number of targets"),
    ("zero.py", "wait_for_parameters(buckets)  # ZeRO: for", "pass  # ZeRO: for",
     "zero same_run own_model", "whoever reads the weights after the loop gets stale rows"),
    ("zero.py", "rows = -(-len(parameter) // n)", "rows = len(parameter) // n",
     "same_run own_model", "rows that n ranks do not divide belong to nobody"),
    ("zero.py", "shard.grad.to_local().add_(gradient)", "shard.grad.to_local().copy_(gradient)",
     "same_run own_model", "stage 2 trains on the last micro-batch alone"),
    ("zero.py", "bucket.stale = True", "bucket.stale = False",
     "same_run", "no rank gets the rows that others have updated"),
    ("zero.py", "seed_step(args.seed, step, sampler.rank)", "seed_step(args.seed, step)",
     "same_run own_model", "all ranks draw the same dropout for different samples"),
    ("fsdp.py", "cast_forward_inputs=False", "cast_forward_inputs=True",
     "own_model", "rotary angles become bfloat16"),
    ("fsdp.py", "model.set_requires_all_reduce(last)", "model.set_requires_all_reduce(i == 0)",
     "same_run", "replicas train apart on all micro-batches but the first"),
    ("fsdp.py", "MixedPrecisionPolicy(dtype, dtype and torch.float32)",
     "MixedPrecisionPolicy(dtype, dtype)", "same_run own_model", "gradients add up in bfloat16"),
    ("fsdp.py", "add_gradients_up(model)  # FSDP: each", "pass  # FSDP: each",
     "same_run", "with replicas gradients are 1/R of those of one process"),
    ("tp.py", "seed_step(args.seed, step, tp_rank)", "seed_step(args.seed, step)",
     "same_run own_model", "all parts of the sequence have the same dropout"),
    ("tp.py", "report.log(step, loss / n, grad_norm)", "report.log(step, loss, grad_norm)",
     "same_run", "the logged loss is n times the loss"),
    ("tp.py", "dist.all_reduce(whole, group=group)", "pass",
     "same_run", "each rank trains norms on its part of the sequence"),
    ("tp.py", "[Partial()] if partial_gradients", "[Replicate()] if partial_gradients",
     "porting", "the gradient of adaLN is that of one part of the sequence"),
    ("cp.py", "if i == args.grad_accum - 1:", "if i == 0:",
     "cp same_run", "gradients of the last micro-batch are not added up"),
    ("cp.py", "slice(length // 2), False", "slice(length // 2 + 1), False",
     "cp", "queries see one key of the future"),
    ("cp.py", "x.repeat_interleave(n // kv_heads, dim=1)", "x.repeat(1, n // kv_heads, 1, 1)",
     "cp porting", "Ulysses gives queries the keys of other heads"),
    ("cp.py", "seed_step(args.seed, step, cp_rank)", "seed_step(args.seed, step)",
     "cp own_model", "all parts of the sequence have the same dropout"),
    ("cp.py", "(targets != -100).sum()", "targets.numel()",
     "same_run", "validation counts targets that are ignored"),
    ("pp.py", "count_targets(batch))", "count_targets(batch[:1]))",
     "pp same_run", "with accumulation the mean is over the first micro-batch"),
    ("pp.py", "scale_grads=False", "scale_grads=True",
     "pp same_run", "gradients are divided by the number of micro-batches"),
    ("pp.py", "dist.all_reduce(total, group=group)", "pass",
     "pp same_run", "each stage clips by its own norm"),
    ("pp.py", 'seed_step(args.seed, step, mesh.get_local_rank("pp"))', "seed_step(args.seed, step)",
     "pp own_model", "all stages have the same dropout"),
    ("pp.py", "(k * v * M + n - 1)", "(k * v * M)",
     "pp", "the bubble is said to be larger than it is"),
    ("pp.py", "args.config.hidden_size, dtype=args.compute_dtype)",
     "args.config.hidden_size, dtype=args.param_dtype)",
     "pp same_run", "hidden states of bfloat16 are announced as float32"),
    ("fsdp.py", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)",
     "experts", "gradients are halved"),
    ("ep.py", "dist.all_reduce(total)", "pass",
     "experts", "each rank clips by the norm of its own shards"),
    ("ep.py", "Permute.apply(rows, inverse(order))", "Permute.apply(rows, order)",
     "experts", "outputs of experts go back to other tokens"),
    ("ep.py", "dtype and torch.float32", "dtype",
     "experts", "gradients of experts add up in bfloat16"),
    ("hybrid_3d.py", "model.forward, positions=positions)", "model.forward, positions=None)",
     "same_run hybrid", "rotary angles of a shard are those of the sequence's begin"),
    ("hybrid_3d.py", "mesh=dp_mesh,", 'mesh=mesh["dp_shard"],',
     "same_run hybrid", "replicas read the same samples"),
    ("hybrid_3d.py", "count_targets(batch, dp_mesh.get_group())", "count_targets(batch)",
     "same_run", "each rank divides by its own number of targets"),
    ("hybrid_3d.py", "sampler.rank, cp_rank, tp_rank, stage)", "sampler.rank, cp_rank, stage)",
     "hybrid own_model", "all parts of the residual stream have the same dropout"),
    ("hybrid_3d.py", "length //= tp if args.sequence_parallel else 1", "length //= 1",
     "same_run hybrid", "stages expect hidden states of the whole sequence"),
    ("hybrid_3d.py", 'args.max_norm, mesh.get_group("pp"))',
     'args.max_norm, mesh.get_group("dp_shard"))', "same_run", "the norm counts shards twice"),
    ("diloco.py", "(value - own) / replicas.size()", "(value - own)",
     "diloco", "the outer step takes the sum of the replicas' moves"),
    ("diloco.py", "nesterov=momentum > 0", "nesterov=False",
     "diloco", "the outer optimizer is another one than the paper's"),
    # What every script needs
    ("common/data.py", "out >= size", "out > size",
     "data", "the order has an index beyond the data"),
    ("common/data.py", "rank // replication,", "rank % (world_size // replication),",
     "data", "ranks of one replica read different samples"),
    ("common/tokens.py", ">= self.vocab_size:", "> self.vocab_size:",
     "data refusals", "the first token beyond the vocabulary is not refused"),
    ("common/tokens.py", "max(0, self.tokens - 1)", "max(0, self.tokens)",
     "data", "the last sample lacks its last target"),
    ("common/tokens.py", "<= 2**16 else", "< 2**16 else",
     "data", "ids of a vocabulary of 65,536 are read as uint32"),
    ("common/data.py", "generator=torch.Generator(),", "generator=None,",
     "data validation", "reading data moves the random state of training"),
    ("common/step.py", '"weight_decay": 0.0', '"weight_decay": weight_decay',
     "own_model model", "norms decay"),
    ("common/step.py", "args.lr * (step + 1) / args.warmup_steps",
     "args.lr * step / args.warmup_steps", "own_model", "the first step changes no weight"),
    ("common/step.py", "repr((seed, step, *ranks))", "repr((seed, *ranks))",
     "own_model", "every step has the same dropout"),
    ("common/materialise.py", "(2 * config.num_hidden_layers)", "(config.num_hidden_layers)",
     "model own_model", "o_proj and down_proj start too large by a factor of 1.4"),
    ("common/materialise.py", 'f"{seed} {name} {block}"', 'f"{seed} {name}"',
     "model own_model", "all blocks of rows of a weight are equal"),
    ("common/model.py", "dtype = torch.promote_types(x.dtype, torch.float32)", "dtype = x.dtype",
     "model own_model", "rotary angles are in bfloat16"),
    ("common/model.py", ".clamp(0, 1)", ".clamp(0, 2)",
     "model weights", "rotary scaling changes pairs that must stay as they are"),
    ("common/model.py", "logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits",
     "model same_run", "the loss of bfloat16 logits has 3 digits"),
    ("common/model.py", "if checkpointed and", "if checkpointed and not compiled and",
     "model same_run", "compiled layers keep all activations"),
    ("common/options.py", "args.grad_clip or math.inf", "args.grad_clip",
     "refusals own_model", "--grad-clip 0 scales all gradients to 0"),
    ("common/attention.py", "torch.promote_types(x.dtype, torch.float32)", "x.dtype",
     "cp same_run", "attention to blocks adds up in bfloat16"),
    ("common/experts.py", "weights / weights.sum(1, keepdim=True)", "weights",
     "experts", "the weights of a token's experts do not add up to 1"),
    ("common/experts.py", "layer.bias += rate", "layer.bias -= rate",
     "experts", "busy experts get still more tokens"),
    ("common/experts.py", "wide = torch.promote_types(x.dtype, torch.float32)", "wide = x.dtype",
     "experts", "the router rounds to bfloat16"),
    ("common/launch.py", "f\"attempt {os", "\"attempt {os",
     "launch", "after a restart ranks look for processes that have died"),
    ("common/launch.py", "if rank >= world_size or", "if rank > world_size or",
     "refusals", "a RANK that is WORLD_SIZE is accepted"),
    # Services
    ("common/services/checkpoint.py", "step + 1 == self.stop)", "step == self.stop)",
     "checkpoint", "the last step is not saved"),
    ("common/services/checkpoint.py", "self.asked, dist.ReduceOp.MAX",
     "self.asked, dist.ReduceOp.MIN", "faults", "a signal to one rank stops nobody"),
    ("common/services/checkpoint.py", "slice(_rank(), None, ranks)", "slice(0, 1)",
     "checkpoint damage", "only one file of shards is checked"),
    ("common/services/checkpoint.py", "self.staged[name].copy_(tensor)",
     "self.staged[name] = tensor", "checkpoint exchange", "a save sees weights of later steps"),
    ("common/services/checkpoint_files.py", "path.name < checkpoint.name",
     "path.name <= checkpoint.name", "damage", "a damaged checkpoint is proposed in its own place"),
    ("common/services/run_folder.py", "|tensorboard|wandb.*", "|tensorboard",
     "run_folder", "TensorBoard shows an earlier run's curve in the new one"),
    ("common/services/signals.py", "_first_signal > 1:", "_first_signal > 0:",
     "faults", "a signal that a launcher delivers twice ends the run unsaved"),
    ("common/services/counting.py", "1 - splits[group.rank()] / sum(splits)", "1.0",
     "experts", "tokens that stay on a rank count as sent"),
    ("common/services/theory.py", 'terms["3LX"] = 3 * L * X', 'terms["3LX"] = 2 * L * X',
     "bytes same_run", "tp.py's bytes under checkpointing are other ones"),
    ("common/services/theory.py", "((1 + a) * P + 16 * T + 16)", "(2 * P + 16 * T + 16)",
     "bytes same_run", "zero.py's bytes under accumulation are other ones"),
    ("common/services/validation.py", "module.training = training", "module.training = True",
     "validation", "a frozen BatchNorm trains on after an evaluation"),
    ("common/services/report.py", "step in (self.start, self.args.steps - 1)",
     "step == self.start",
     "user validation", "the last step has no line"),
    ("common/services/hf_weights.py",
     "functools.reduce(torch.promote_types, (part.dtype for part in self.stored[name]))",
     "self.stored[name][0].dtype", "weights experts", "experts take the type of the first one"),
    # Tools
    ("tools/export.py", "size > room", "size >= room",
     "weights", "a tensor that just fits starts another file"),
    ("tools/import_hf.py", "tensors[name].to(weights.dtype(name))", "tensors[name]",
     "weights", "the index of imported weights names another type"),
    ("tools/plan.py", "/ (args.tflops * 1e12) / (1 -", "/ (args.tflops * 1e12) * (1 -",
     "plan", "a bubble makes a step faster"),
    ("tools/support/operations.py", 'products = 5 if name.endswith("backward") else 2',
     'products = 4 if name.endswith("backward") else 2', "dry_run",
     "one product of the backward pass of attention is not counted"),
    ("tools/prepare.py", "args.val * 2**32", "args.val * 2**31",
     "tools", "val.bin gets half of its share"),
    ("tools/bench.py", "theirs[kind] / ours[kind]", "ours[kind] / theirs[kind]",
     "tools", "a slower script is shown as a faster one"),
]]


def copy_with(mutant, folder):
    """Copy what git tracks, and has not lost, to ``folder``, with one fault."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    text = (folder / mutant.path).read_text()
    assert text.count(mutant.old) == 1, mutant
    (folder / mutant.path).write_text(text.replace(mutant.old, mutant.new))


def run(mutant):
    """Whether its tests notice a fault, and which one does first; "timeout" if they do not end."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        folder = pathlib.Path(folder)
        copy_with(mutant, folder / "tree")
        ends = time.monotonic() + SECONDS
        for name in mutant.tests.split():
            words = [f"tests/test_{name}.py", f"--basetemp={folder}/tests"]
            if name == "same_run" and mutant.path in SCRIPTS:  # rows of others run other code
                words += ["-k", mutant.path.removesuffix(".py")]
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-x", *words], cwd=folder / "tree",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=os.environ | {  # what a fault lets torch compile is not to be found again
                    "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"},
            )
            try:
                output, _ = process.communicate(timeout=max(1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                for pid in with_children(process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.wait()
                return True, "timeout"
            if process.returncode not in (0, 1, 2):  # 1: one failed; 2: a file was not imported
                raise RuntimeError(f"pytest ended with {process.returncode}: {output[-2000:]}")
            if process.returncode:
                first = re.search(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - |$)", output)
                return True, first[1] if first else ""
    return False, ""


def with_children(pid):
    """A process and all that it has started: ranks of the tests have process groups of their own"""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True)
    return [pid, *(p for child in children.stdout.split() for p in with_children(int(child)))]


def main(numbers):
    killed, lived = 0, []
    for number in numbers or range(1, len(MUTANTS) + 1):
        mutant, began = MUTANTS[number - 1], time.monotonic()
        noticed, first = run(mutant)
        killed += noticed
        lived += [] if noticed else [number]
        print(f"{number:2} {'killed' if noticed else 'LIVED '} {time.monotonic() - began:4.0f} s "
              f"{mutant.path}: {mutant.why} {first}".rstrip(), flush=True)
    ran = killed + len(lived)
    print(f"killed {killed} of {ran} ({killed / ran:.0%}); lived: {' '.join(map(str, lived))}")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
