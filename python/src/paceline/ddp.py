"""DistributedDataParallel on Paceline's reducer."""
# It overrides private parts of PyTorch's class, which have no types.
# mypy: ignore-errors

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel as _TorchDDP
from torch.nn.parallel.distributed import _BucketCapacityConfig, _find_tensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline import _C

_MIB = 1 << 20

# Arguments of PyTorch's class that ours refuses, and what to do instead.
_REFUSED = {
    "device_ids": "modules are on the CPU: leave it out",
    "output_device": "modules are on the CPU: leave it out",
    "mixed_precision": "use torch.autocast",
    "check_reduction": "it has no effect in PyTorch: leave it out",
    "batched_grad_copy": "large gradients are not copied: leave it out",
    "lazy_bucket_allocation": "large gradients have no buckets: leave it out",
}

# All models. If several wrap a parameter, one of them averages its gradient at a time: see _take_parameters.
_models: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


def _may_leave_models_different(hook_state: object) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    return isinstance(hook_state, PostLocalSGDState)


class _Reducer:
    """What libraries call on `model.reducer` of PyTorch's class."""

    def __init__(self, model: "DistributedDataParallel") -> None:
        self._model = model

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Synchronises the next backward, also if the last forward ran under `no_sync`."""
        for core in self._model._cores():
            core.synchronise_backward()

    def _rebuild_buckets(self) -> bool:
        return False  # the forward has done it, if it was due

    def _delay_all_reduce(self) -> None:
        pass  # with a static graph, the first backward has reduced its gradients itself

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"paceline.DistributedDataParallel has a reducer of its own, which lacks {name}: use "
                             "torch.nn.parallel.DistributedDataParallel")


class _JoinHook(JoinHook):

    def __init__(self, model: "DistributedDataParallel", divide_by_initial_world_size: bool) -> None:
        self._model = model
        self._divide = model._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        self._model._reduction().main_hook(self._model._buffers_to_copy(), self._divide)

    def post_hook(self, is_last_joiner: bool) -> None:
        model = self._model
        last = model._find_common_rank(model._distributed_rank, is_last_joiner)
        model._reduction().post_hook(last, model._buffers_to_copy())
        model._join_config = _JoinConfig.construct_disabled_join_config()


class DistributedDataParallel(_TorchDDP):
    """PyTorch's DistributedDataParallel for modules on the CPU, with Paceline's reducer.

    It takes PyTorch's arguments, and is a torch.nn.parallel.DistributedDataParallel. Over a group of the backend `paceline`,
    gradients of 64 KiB or more are allocated in shared memory and averaged there, without a copy. Over any other backend, each
    bucket is averaged by an asynchronous all-reduce. Construction, `register_comm_hook`, `join`, and the first forward with
    grad mode on of a model that was copied or unpickled, also in evaluation mode, are collective.

    What differs from PyTorch's class:

    - Ranks compare what they have done for each step, and all raise the same torch.distributed.DistBackendError if it differs.
    - A parameter without a gradient is an error in that backward, which names it, unless `find_unused_parameters` is set.
    - Buffers are copied from rank 0 only before forwards in training mode with grad mode on.
    - A backward inside a backward, as in activation checkpointing with use_reentrant=True, needs `static_graph`.
    - If models share parameters, as when a module is wrapped again, the one that ran a forward last averages their gradients, and makes
      its reduction anew for that, which is collective. Several may run forwards in training mode before one backward through all of them,
      and one may be inside of another, which then averages the gradients of both.
    - A backward with create_graph=True is refused.

    Raises ValueError for arguments that it does not support: devices other than the CPU, mixed_precision (use torch.autocast),
    batched_grad_copy and lazy_bucket_allocation (which concern copies and buckets that this class does not have), and
    check_reduction (which has no effect in PyTorch).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: None = None,
        output_device: None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: None = None,
        device_mesh: "dist.device_mesh.DeviceMesh | None" = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        dist.algorithms.join.Joinable.__init__(self)
        given = {"device_ids": device_ids, "output_device": output_device, "mixed_precision": mixed_precision,
                 "check_reduction": check_reduction, "batched_grad_copy": batched_grad_copy,
                 "lazy_bucket_allocation": lazy_bucket_allocation}
        for name in _refused(given):
            raise ValueError(f"paceline.DistributedDataParallel does not take {name}={given[name]!r}: {_REFUSED[name]}")
        _check_exclusive(broadcast_buffers=broadcast_buffers, forward_sync_buffers=forward_sync_buffers)
        _check_exclusive(bucket_cap_mb=bucket_cap_mb, bucket_cap_mb_list=bucket_cap_mb_list)
        _check_exclusive(process_group=process_group, device_mesh=device_mesh)
        for cap in [*(bucket_cap_mb_list or []), *([] if bucket_cap_mb is None else [bucket_cap_mb])]:
            if not cap > 0:
                raise ValueError(f"a bucket of {cap} MiB: bucket_cap_mb and bucket_cap_mb_list must be positive")
        if device_mesh is not None:
            if not _is_whole(device_mesh):
                raise ValueError(f"paceline.DistributedDataParallel needs a device_mesh of one dimension that is not part of a larger "
                                 f"one, not {device_mesh}: pass process_group=device_mesh.get_group(...), or use fully_shard")
            self.device_mesh, process_group = device_mesh, device_mesh.get_group(mesh_dim=0)
        self.process_group = process_group or dist.distributed_c10d._get_default_group()
        if dist.get_rank(self.process_group) < 0:
            raise ValueError("this rank is not a member of process_group: wrap the module on the group's ranks only")

        self.module = module
        self.dim = dim
        self.device_ids = self.output_device = self.mixed_precision = self.logger = None
        self.device, self.device_type, self.is_multi_device_module = torch.device("cpu"), "cpu", False
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.forward_sync_buffers = forward_sync_buffers if broadcast_buffers is None else broadcast_buffers
        if self.forward_sync_buffers is None:
            self.forward_sync_buffers = True
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = static_graph
        self.batched_grad_copy = self.lazy_bucket_allocation = False
        self.require_backward_grad_sync = True
        self._bucket_config = _BucketCapacityConfig.create(bucket_cap_mb, bucket_cap_mb_list, use_python_reducer=False)
        self.bucket_bytes_cap = self._bucket_config.bucket_bytes_cap  # torch.compile reads it
        self.bucket_bytes_cap_list = list(self._bucket_config.per_bucket_bytes_caps)
        self.bucket_bytes_cap_default = self._bucket_config.first_bucket_bytes_cap < self.bucket_bytes_cap
        self.broadcast_bucket_size = 250 * _MIB
        self._delayed, self._delayed_until = _names_of_delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._set_up()
        # PyTorch's broadcast_buffers=False leaves buffers alone at construction, too; forward_sync_buffers=False does not.
        self._make_reduction(init_sync, with_buffers=broadcast_buffers is not False, shares=False)

    def _set_up(self) -> None:
        """Sets what is not pickled."""
        self._core: _C.Reducer | None = None
        self._owned: set[int] = set()  # ids of the parameters whose gradients the core averages
        self._other_cores: list[weakref.ref[_C.Reducer]] = []  # of other models, which average the rest
        self._guards: dict[int, Any] = {}  # handles of hooks by ids of parameters: see _lose_core
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._use_python_reducer = self._delay_all_reduce_all_params = self._require_manual_backward_finalization = False
        self._lazy_init_ran = False
        self._forwards = 0
        self._in_forward = False
        self._divide_by_initial_world_size = True
        self._assign_modules_buffers()

    @_disable_dynamo
    def _make_reduction(self, init_sync: bool, with_buffers: bool = True, shares: bool = True) -> None:
        """Makes the core, if other models do not average all parameters; collective."""
        parameters = [(name, parameter) for name, parameter in self.module.named_parameters()
                      if name not in self.parameters_to_ignore]
        for name, parameter in parameters:
            _check_parameter(name, parameter)
        for name, buffer in self.named_module_buffers.items():
            if buffer.layout != torch.strided:
                raise ValueError(f"buffer {name} is {buffer.layout}: paceline.DistributedDataParallel copies dense buffers; list it in "
                                 "module._ddp_params_and_buffers_to_ignore")
        sparse = {id(part.weight) for part in self.module.modules()
                  if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse}
        for part in self.module.modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise ValueError("the module has a SyncBatchNorm, which PyTorch does not run on the CPU: use BatchNorm")
        self._module_parameters = [parameter for _, parameter in parameters]
        _models.add(self)
        left = self._take_parameters(shares)
        parameters = [(name, parameter) for name, parameter in parameters if id(parameter) not in left]
        self._owned = {id(parameter) for _, parameter in parameters if parameter.requires_grad}
        if left and not self._owned:
            return
        delayed, delayed_until = self._delayed, self._delayed_until
        if left:
            names = {name for name, _ in parameters}
            delayed = [name for name in delayed if name in names]
            if not delayed or delayed_until not in names:
                delayed, delayed_until = [], ""
        config = self._bucket_config
        caps = config.per_bucket_bytes_caps or (config.first_bucket_bytes_cap, config.bucket_bytes_cap)
        self._core = _C.Reducer(
            parameters=[(name, parameter, id(parameter) in sparse) for name, parameter in parameters],
            buffers=list(self.named_module_buffers.items()) if with_buffers else [],
            process_group=self.process_group,
            init_sync=init_sync,
            bucket_cap_mb_list=[cap / _MIB for cap in caps],
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=delayed_until,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
        )
        for hook, state in self._comm_hooks:
            self._core.register_comm_hook(state, hook, _may_leave_models_different(state))

    def _take_parameters(self, shares: bool) -> set[int]:
        """Ends the reductions of other models that have some of this one's parameters.

        If `shares`, leaves their parameters, which it returns by id, to models that have run a forward in training mode and wait for its
        backward, as actor and critic do before a common one, and to a model that runs this one in its forward. All ranks do so alike:
        they have run the same training forwards.
        """
        own = {id(parameter) for parameter in self._module_parameters if parameter.requires_grad}
        self._other_cores = []
        left: set[int] = set()
        for other in list(_models):
            for parameter in own & other._guards.keys():
                other._guards.pop(parameter).remove()
            common = own & other._owned
            if other is self or other._core is None or not common:
                continue
            if shares and _is_in_step(other._core) and other.process_group == self.process_group:
                self._other_cores.append(weakref.ref(other._core))
                left |= common
            else:
                other._lose_core(own)
        return left

    def _lose_core(self, taken: set[int]) -> None:
        """Ends the reduction, as another model takes some parameters. The rest must get no gradients before the next forward."""
        if self._in_forward:
            raise RuntimeError("a forward of a paceline.DistributedDataParallel made another one with some of its parameters, or ran one "
                               "that averages them over another process group: make the inner one before, over the same group, or list "
                               "the parameters in _ddp_params_and_buffers_to_ignore of the outer module")
        rest = self._owned - taken if self._core.may_get_gradients() else set()
        for name, parameter in self.module.named_parameters():
            if id(parameter) in rest and parameter.requires_grad:
                self._guards[id(parameter)] = parameter.register_post_accumulate_grad_hook(_refusal_of(name, self))
        self._end_core()

    def _end_core(self) -> None:
        if self._core is not None:
            self._core.end()
        self._core = None

    def _cores(self) -> "list[_C.Reducer]":
        """The cores that average this model's gradients."""
        own = self._find_core()
        return ([own] if own else []) + [core for core in (other() for other in self._other_cores) if core is not None]

    def _find_core(self) -> "_C.Reducer | None":
        """The core, made if there is none; None if other models average all parameters."""
        if self._other_cores and all(_is_in_step(other()) for other in self._other_cores):
            return self._core
        if self._other_cores:
            self._end_core()  # the others do not take part in this step
        return self._made()

    def _reduction(self) -> "_C.Reducer":
        """The core; for calls that need one."""
        core = self._made()
        if core is None:
            raise RuntimeError("all parameters of this model are averaged by other models, which have run forwards: run their backward "
                               "before")
        return core

    def _made(self) -> "_C.Reducer | None":
        """The core. A copy, or an unpickled model, has none until here; making it is collective."""
        if self._core is None:
            try:
                self._make_reduction(init_sync=False)
            except dist.DistBackendError as error:
                error.add_note("A model that was copied, unpickled or wrapped again makes its reduction in its first forward with grad "
                               "mode on, which is collective: call it on all ranks, or evaluate on one rank under torch.no_grad()")
                raise
        return self._core

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward. The last forward with grad mode on decides whether the next backward is synchronised."""
        module = self.module
        if not torch.is_grad_enabled():
            return module(*inputs, **kwargs)
        core = self._before_forward(module)
        if core is None:
            return module(*inputs, **kwargs)
        # By this, torch.compile splits the module's graph at its buckets.
        outer, _TorchDDP._active_ddp_module = _TorchDDP._active_ddp_module, self
        own = self.__dict__  # Module.__setattr__ would take longer
        outermost, own["_in_forward"] = not self._in_forward, True
        try:
            output = module(*inputs, **kwargs)
        finally:
            _TorchDDP._active_ddp_module = outer
            own["_in_forward"] = not outermost
        core.after_forward()
        if self.static_graph:
            for tensor in _find_tensors(output):
                core.watch_output(tensor)
        return output

    def _before_forward(self, module: nn.Module) -> "_C.Reducer | None":
        training = module.training
        divide = None
        if training and self._join_config.enable:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
            divide = self._divide_by_initial_world_size
        core = self._find_core() if self._core is None or self._other_cores else self._core
        self._check_module()
        if core is None:
            for buffer in self._buffers_to_copy() if training else []:
                dist.broadcast(buffer, group=self.process_group, group_src=0)
            return None
        buffers = self._buffers_to_copy() if training and core.buffers_may_differ else []
        core.before_forward(training, self.require_backward_grad_sync, buffers, divide)
        return core

    def _check_module(self) -> None:
        # Rarely, as it walks through the module.
        forwards = self.__dict__["_forwards"] = self._forwards + 1
        if forwards & (forwards - 1):
            return
        named = [(name, one) for name, one in self.module.named_parameters() if name not in self.parameters_to_ignore]
        parameters = [parameter for _, parameter in named]
        now, before = len(parameters), len(self._module_parameters)
        if now != before:
            raise ValueError(f"the module has {now} parameters and had {before} when it was wrapped: wrap it after it is complete")
        for (name, parameter), wrapped in zip(named, self._module_parameters):
            # functional_call gives the module plain tensors for the time of a call.
            if parameter is not wrapped and isinstance(parameter, nn.Parameter):
                raise ValueError(f"parameter {name} is another tensor than when the module was wrapped: replace layers, or load with "
                                 "assign=True, before the module is wrapped")
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
            raise ValueError("paceline.DistributedDataParallel does not support _apply_optimizer_in_backward: call the optimizer's "
                             "step() after the backward")

    def _buffers_to_copy(self) -> list[torch.Tensor]:
        """The buffers that forwards copy from rank 0. The module may replace them at any time."""
        if not self.forward_sync_buffers or not self.modules_buffers:
            return []
        self._assign_modules_buffers()
        return self.modules_buffers

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for torch.distributed.algorithms.join.Join."""
        return _JoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def register_comm_hook(self, state: object, hook: Callable[[Any, dist.GradBucket], torch.futures.Future]) -> None:
        """Makes `hook(state, bucket)` communicate every bucket from now on; see PyTorch's class. Collective.

        Gradients then pass through buckets. At most one hook, before the first backward. If it raises, all ranks raise its text.
        """
        if not callable(hook):
            raise TypeError(f"the communication hook must be callable with a state and a bucket, not {hook!r}")
        self._reduction().register_comm_hook(state, hook, _may_leave_models_different(state))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Registers PyTorch's Python version of a hook that it has in C++, too."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
                 dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook}
        # Without a group, they take the default one. A group cannot be copied or pickled with the model.
        is_default = self.process_group == dist.distributed_c10d._get_default_group()
        self.register_comm_hook(None if is_default else self.process_group, hooks[comm_hook_type])

    def _set_static_graph(self) -> None:
        """Sets static_graph, before the first step. The next forward is collective then."""
        if self.static_graph:
            return
        if self._core is not None and self._core.steps() > 0:
            raise ValueError("_set_static_graph: call it before the first step, or pass static_graph=True")
        self.static_graph = True
        self._end_core()

    @property
    def reducer(self) -> _Reducer:
        """For libraries that prepare backwards themselves."""
        return _Reducer(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are final; the hooks of ZeroRedundancyOptimizer ask for it."""
        return self._core is not None and self._core.steps() > 0

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next training forward copies rank 0's buffers, if it copies any."""
        return self._core is None or self._core.buffers_may_differ

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, required: bool) -> None:
        self._reduction().buffers_may_differ = required

    @property
    def require_manual_backward_finalization(self) -> bool:
        """False: a backward ends with its reduction."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise ValueError("paceline.DistributedDataParallel does not take require_manual_backward_finalization=True: a backward "
                             "ends with its reduction, leave it out")

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = self.__dict__.copy()
        del state["process_group"], state["_core"], state["_owned"], state["_other_cores"], state["_guards"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = dist.distributed_c10d._get_default_group()
        nn.Module.__setstate__(self, state)
        hooks = self._comm_hooks
        self._set_up()
        self._comm_hooks = hooks

    def _register_buffer_comm_hook(self, state: object, hook: Callable[..., Any], *location: Any) -> None:
        raise NotImplementedError("paceline.DistributedDataParallel has no hooks for buffers: set forward_sync_buffers=False, and "
                                  "communicate buffers in the training loop")

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("paceline.DistributedDataParallel has no fused optimizers: call the optimizer's step() after the "
                                  "backward")

    def _get_ddp_logging_data(self) -> dict[str, int]:
        """The number of steps, and the times of the last step and of an average one in nanoseconds, as PyTorch names them."""
        return self._reduction().logging_data()


def _is_in_step(core: "_C.Reducer | None") -> bool:
    """Whether the model with this core runs a forward, or awaits the backward of one."""
    return core is not None and (core.awaits_backward() or any(model._in_forward and model._core is core for model in _models))


def _refusal_of(name: str, model: DistributedDataParallel) -> Callable[[torch.Tensor], None]:
    living = weakref.ref(model)

    def refuse(_: torch.Tensor) -> None:
        if living() is None:
            return
        raise RuntimeError(f"parameter {name} got a gradient that no model averages: another paceline.DistributedDataParallel has taken "
                           "parameters that both have, since this model's forward. Run the forwards of both in training mode before a "
                           "common backward, after both were wrapped; or wrap one module that has both")

    return refuse


def _refused(given: dict[str, Any]) -> list[str]:
    """The names of the arguments in `given` that are set and in _REFUSED."""
    return [name for name, value in given.items()
            if name in _REFUSED and value is not None and value is not False and value != []]


def _is_whole(mesh: "dist.device_mesh.DeviceMesh") -> bool:
    return mesh.ndim == 1 and mesh._get_root_mesh() == mesh


def _check_exclusive(**given: Any) -> None:
    if all(value is not None for value in given.values()):
        raise ValueError(f"set {' or '.join(given)}, not both")


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter {name} is not initialized yet: run a forward of the module before wrapping it")
    if parameter.device.type != "cpu":
        raise ValueError(f"parameter {name} is on {parameter.device}: paceline.DistributedDataParallel is for modules on the CPU; use "
                         "torch.nn.parallel.DistributedDataParallel")
    if is_traceable_wrapper_subclass(parameter):
        raise ValueError(f"parameter {name} is a {type(parameter).__name__}, not a plain tensor: use "
                         "torch.nn.parallel.DistributedDataParallel or fully_shard")


def _names_of_delayed(module: nn.Module, delayed: list[tuple[str, nn.Parameter]] | None,
                      until: nn.Parameter | None) -> tuple[list[str], str]:
    if (delayed is None) != (until is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need each other")
    if delayed is None:
        return [], ""
    for name, parameter in module.named_parameters():
        if parameter is until:
            return [one for one, _ in delayed], name
    raise ValueError("param_to_hook_all_reduce is not a parameter of the module")


def replace_ddp() -> None:
    """Makes torch.nn.parallel.DistributedDataParallel(...) construct paceline.DistributedDataParallel.

    For libraries that construct PyTorch's class themselves, whenever they were imported: call it before they wrap a model. Models
    that exist, and classes derived from PyTorch's, keep PyTorch's class; so do modules on other devices than the CPU, modules with
    DTensors, and calls with arguments that this class does not support. Calling it again changes nothing.
    """
    _TorchDDP.__new__ = staticmethod(_new)


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    if cls is _TorchDDP and _is_replaced(*args, **kwargs):
        cls = DistributedDataParallel
    return object.__new__(cls)


def _is_replaced(*args: Any, **kwargs: Any) -> bool:
    """Whether PyTorch's class with these arguments becomes ours."""
    try:
        given = inspect.signature(_TorchDDP.__init__).bind(None, *args, **kwargs).arguments
    except TypeError:  # __init__ raises it; or this is an unpickled or copied instance, which is made without arguments
        return False
    module, mesh = given["module"], given.get("device_mesh")
    return (isinstance(module, nn.Module) and not _refused(given) and (mesh is None or _is_whole(mesh))
            and all(one.device.type == "cpu" and not is_traceable_wrapper_subclass(one) for one in module.parameters()))


_new.__signature__ = inspect.signature(_TorchDDP.__init__)  # what tools show of the class
