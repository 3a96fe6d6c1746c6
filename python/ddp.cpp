#include "ddp.h"

#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.h"
#include "parallel/comm_hooks/hook_bucket_reducer.h"
#include "parallel/comm_hooks/running_hook.h"
#include "parallel/ddp/ddp_core.h"

namespace py = pybind11;

namespace paceline::python {
namespace {

// The reduction of a Python module's gradients. Nothing here holds the GIL while it waits for other
// ranks: calls release it, and autograd runs backwards without it.
class Reducer {
 public:
  using Parameters = std::vector<std::tuple<std::string, at::Tensor, bool>>;
  using Buffers = std::vector<std::pair<std::string, at::Tensor>>;

  Reducer(const Parameters& parameters, const Buffers& buffers, const DdpOptions& options)
      : core_(std::make_unique<detail::DdpCore>(wrap(parameters, buffers), options)) {
    core_->on_backward_error(throw_through_autograd);
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  // May destroy a group, which joins threads that may need the GIL.
  ~Reducer() {
    const py::gil_scoped_release release;
    core_.reset();
  }

  // `buffers`: what the forward copies from rank 0 if they may differ.
  // `divide_by_initial_world_size`: in join, its option; else unset.
  void before_forward(bool training, bool synchronise, std::vector<at::Tensor> buffers,
                      std::optional<bool> divide_by_initial_world_size) {
    core().set_buffers(std::move(buffers));
    set_join(divide_by_initial_world_size);
    core_->before_forward(training, synchronise);
  }
  void main_hook(std::vector<at::Tensor> buffers, bool divide_by_initial_world_size) {
    core().set_buffers(std::move(buffers));
    set_join(divide_by_initial_world_size);
    core_->main_hook();
  }
  void post_hook(int last, std::vector<at::Tensor> buffers) {
    core().set_buffers(std::move(buffers));
    core_->post_hook(last);
  }

  detail::DdpCore& core() {
    if (core_) return *core_;
    throw UsageError(
        "another DistributedDataParallel has taken parameters of this one since its last forward: "
        "run a forward of this one again");
  }
  // Ends the reduction, also if something such as a compiled graph keeps this object.
  void end() {
    if (core_ && core_->runs_backward()) {
      throw UsageError(
          "in the backward of a DistributedDataParallel, another one with some of its parameters "
          "ran a forward, as if checkpointed as a whole: checkpoint inside of the wrapped module");
    }
    core_.reset();
  }
  bool awaits_backward() const { return core_ && core_->awaits_backward(); }

 private:
  static ddp::WrappedModel wrap(const Parameters& parameters, const Buffers& buffers) {
    std::vector<ddp::NamedTensor> named_parameters;
    for (const auto& [name, tensor, sparse] : parameters) {
      named_parameters.push_back({name, tensor, sparse});
    }
    std::vector<ddp::NamedTensor> named_buffers;
    for (const auto& [name, tensor] : buffers) named_buffers.push_back({name, tensor});
    return {named_parameters, named_buffers};
  }
  void set_join(std::optional<bool> divide_by_initial_world_size) {
    std::optional<JoinOptions> options;
    if (divide_by_initial_world_size) {
      options = {.divide_by_initial_world_size = *divide_by_initial_world_size};
    }
    core_->set_join(options);
  }

  std::unique_ptr<detail::DdpCore> core_;
};

// Hooks of PyTorch, such as PowerSGD's, make calls in the callbacks of their futures.
class CommHook final : public c10d::PythonCommHook, public comm_hooks::OneBucketAtATime {
 public:
  CommHook(py::object state, py::object hook, bool models_may_differ)
      : PythonCommHook(std::move(state), std::move(hook)), models_may_differ_(models_may_differ) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    if (models_may_differ_) comm_hooks::RunningHook::require("Python").let_models_differ();
    return PythonCommHook::runHook(bucket);
  }

 private:
  bool models_may_differ_;
};

std::unique_ptr<Reducer> make_reducer(const Reducer::Parameters& parameters,
                                      const Reducer::Buffers& buffers,
                                      c10::intrusive_ptr<c10d::ProcessGroup> group, bool init_sync,
                                      const std::vector<double>& bucket_cap_mb_list,
                                      bool find_unused_parameters, bool gradient_as_bucket_view,
                                      bool static_graph,
                                      const std::vector<std::string>& delay_all_reduce_named_params,
                                      const std::string& param_to_hook_all_reduce,
                                      bool skip_all_reduce_unused_params) {
  return std::make_unique<Reducer>(
      parameters, buffers,
      DdpOptions{.init_sync = init_sync,
                 .process_group = ProcessGroup(std::move(group)),
                 .find_unused_parameters = find_unused_parameters,
                 .gradient_as_bucket_view = gradient_as_bucket_view,
                 .static_graph = static_graph,
                 .delay_all_reduce_named_params = delay_all_reduce_named_params,
                 .param_to_hook_all_reduce = param_to_hook_all_reduce,
                 .skip_all_reduce_unused_params = skip_all_reduce_unused_params,
                 .bucket_cap_mb_list = bucket_cap_mb_list});
}

// Under the names of PyTorch's DDP logging data; durations in nanoseconds.
std::map<std::string, std::int64_t> logging_data(const DdpStats& stats) {
  const auto steps = static_cast<std::int64_t>(std::max<std::uint64_t>(stats.steps, 1));
  std::map<std::string, std::int64_t> data{{"iteration", static_cast<std::int64_t>(stats.steps)}};
  const auto add = [&](const std::string& name, StepStats::Duration StepStats::*duration) {
    data[name] = (stats.last.*duration).count();
    data["avg_" + name] = (stats.total.*duration).count() / steps;
  };
  add("forward_compute_time", &StepStats::forward);
  add("backward_compute_time", &StepStats::backward);
  add("backward_comm_time", &StepStats::communication);
  add("backward_compute_comm_overlap_time", &StepStats::overlap);
  return data;
}

}  // namespace

void bind_ddp(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Reducer>(module, "Reducer")
      .def(py::init(&make_reducer), py::kw_only(), py::arg("parameters"), py::arg("buffers"),
           py::arg("process_group"), py::arg("init_sync"), py::arg("bucket_cap_mb_list"),
           py::arg("find_unused_parameters"), py::arg("gradient_as_bucket_view"),
           py::arg("static_graph"), py::arg("delay_all_reduce_named_params"),
           py::arg("param_to_hook_all_reduce"), py::arg("skip_all_reduce_unused_params"), Release())
      .def("before_forward", &Reducer::before_forward, py::arg("training"), py::arg("synchronise"),
           py::arg("buffers"), py::arg("divide_by_initial_world_size"), Release())
      .def("after_forward", [](Reducer& self) { self.core().after_forward(); })
      .def("watch_output",
           [](Reducer& self, const at::Tensor& output) { self.core().watch_output(output); })
      .def("end", &Reducer::end, Release())
      .def("awaits_backward", &Reducer::awaits_backward)
      .def("may_get_gradients", [](Reducer& self) { return self.core().may_get_gradients(); })
      .def("synchronise_backward", [](Reducer& self) { self.core().synchronise_backward(); })
      .def_property(
          "buffers_may_differ", [](Reducer& self) { return self.core().buffers_may_differ(); },
          [](Reducer& self, bool differ) { self.core().set_buffers_may_differ(differ); })
      .def(
          "register_comm_hook",
          [](Reducer& self, py::object state, py::object hook, bool models_may_differ) {
            auto made =
                std::make_shared<CommHook>(std::move(state), std::move(hook), models_may_differ);
            const py::gil_scoped_release release;
            self.core().register_comm_hook(std::move(made));
          },
          py::arg("state"), py::arg("hook"), py::arg("models_may_differ"))
      .def("main_hook", &Reducer::main_hook, py::arg("buffers"),
           py::arg("divide_by_initial_world_size"), Release())
      .def("post_hook", &Reducer::post_hook, py::arg("last"), py::arg("buffers"), Release())
      .def("steps", [](Reducer& self) { return self.core().stats().steps; })
      .def("logging_data", [](Reducer& self) { return logging_data(self.core().stats()); });
}

}  // namespace paceline::python
