"""What a rank uses of a model that FSDP shards. Ranks that use other units, or other parameters of
a unit, exchange parameters and gradients of different ones without an error, or wait for ever."""

import functools

from torch.distributed.fsdp import FSDPModule, fully_shard

from common.options import SettingError


def refuse_hooks(parameter):
    """Raise SettingError if ``parameter`` has hooks, of which FSDP would call none."""
    if parameter._backward_hooks:  # no public name leads to them
        raise SettingError("FSDP never calls a hook on a gradient, as register_hook makes one: "
                           "change p.grad before clipping instead")


class Usage:
    """What this rank uses of a sharded ``model`` in a step: ``order``, a hash of the numbers of its
    units, i in the forward pass and -i where the backward pass reduces them; ``used``, the
    parameters that got a gradient. ``Run`` takes the maximum of all ranks' ``flags``, for
    ``check``. ``stage`` of ``stages``: a pipeline's, alike in itself."""

    def __init__(self, model, stage=0, stages=1):
        self.order, self.used, self.stage, self.stages = 0, set(), stage, stages
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        # No public name leads to the gathered parameters, which tell what has a gradient, nor to
        # the order of the backward pass: that of gradients tells nothing of a unit without any.
        groups = dict.fromkeys(  # modules of one unit share it
            group for unit in units for group in fully_shard.state(unit)._fsdp_param_groups)
        for i, group in enumerate(groups, 2):  # in Python hash(-1) is hash(-2)
            for module in group.modules:
                module.register_forward_pre_hook(functools.partial(self.note, i))
            group.post_backward = functools.partial(
                self.before_reduction, -i, group, group.post_backward)
        self.parameters = [p for group in groups for p in group.fsdp_params]

    def note(self, i, *_):
        self.order = hash((self.order, i)) % 2**62

    def before_reduction(self, i, group, reduce, *args):
        self.note(i)
        for p in group.fsdp_params:
            refuse_hooks(p.sharded_param)
            gathered = getattr(p, "unsharded_param", None)  # None: it never was
            gradient = getattr(gathered, "grad", None)
            if gradient is not None or p.unsharded_accumulated_grad is not None:
                self.used.add(p)
        reduce(*args)

    def flags(self):
        """What this rank has used in the step that ends."""
        trained = {p for p in self.parameters if p.sharded_param.requires_grad}
        # x and -x of each stage: if all ranks have the same x, so are the maxima.
        orders = [-(2**62)] * (2 * self.stages)
        orders[2 * self.stage : 2 * self.stage + 2] = self.order, -self.order
        left_out = not trained <= self.used
        self.order = 0
        self.used.clear()
        return [left_out, *orders]

    def check(self, step, largest):
        """``largest``: the maxima of the flags of all ranks. Raises SettingError."""
        left_out, *orders = largest
        if any(x != -minus_x for x, minus_x in zip(orders[::2], orders[1::2])):
            raise SettingError(
                f"in step {step} ranks used other units of FSDP, or in another order: put parts "
                f"that some ranks leave out into one unit, of which all call the same modules")
        if left_out:
            raise SettingError(
                f"in step {step} a rank left out parameters of its model: add 0 * their sum to "
                f"what it computes, in the forward pass of their unit, or freeze them")
