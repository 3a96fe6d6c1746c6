// paceline._C: makes the backend `paceline` for torch.distributed, and what
// paceline.DistributedDataParallel stands on.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <paceline/tune_malloc.h>
#include <paceline/version.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "backends/paceline/backend.h"
#include "backends/paceline/reconfigurable_backend.h"
#include "ddp.h"
#include "distributed/debug/handlers.h"
#include "errors.h"
#include "logging.h"

namespace py = pybind11;

namespace paceline::python {
namespace {

class PythonBackend final : public backends::PacelineBackend {
 public:
  using PacelineBackend::PacelineBackend;
  // The destructor joins the progress thread, which may run a future's callback that needs the GIL.
  ~PythonBackend() override {
    if (PyGILState_Check() == 0) return;
    const py::gil_scoped_release release;
    shutdown();
  }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    auto region = split_region(store, ranks, options);
    if (!region) return {};
    return c10::make_intrusive<PythonBackend>(std::move(region));
  }
};

c10::intrusive_ptr<c10d::Backend> create(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                         std::chrono::milliseconds timeout, std::string group_name,
                                         std::vector<int> world_ranks,
                                         const backends::PacelineOptions& options,
                                         bool reconfigurable) {
  distributed::BackendRequest request{.store = std::move(store),
                                      .rank = rank,
                                      .size = size,
                                      .timeout = timeout,
                                      .group_name = std::move(group_name),
                                      .options = options.for_request(),
                                      .members = std::move(world_ranks)};
  if (reconfigurable) {
    return c10::make_intrusive<backends::ReconfigurableBackend>(
        request, [](std::shared_ptr<shm::Region> region) {
          return c10::make_intrusive<PythonBackend>(std::move(region));
        });
  }
  return c10::make_intrusive<PythonBackend>(backends::form_region(std::move(request)));
}

}  // namespace
}  // namespace paceline::python

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled part of the package paceline.";
  module.attr("__version__") = paceline::kVersion;
  py::module_::import(
      "torch._C._distributed_c10d");  // registers the types of arguments and results
  py::register_exception_translator([](std::exception_ptr thrown) {
    if (thrown) paceline::python::set_python_error(std::move(thrown));
  });
  module.def("create", &paceline::python::create, py::arg("store"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("group_name"), py::arg("world_ranks"),
             py::arg("options"), py::arg("reconfigurable"),
             py::call_guard<py::gil_scoped_release>(),
             "Makes the backend of one group. Every rank of the group calls it; torch.distributed "
             "does so.");
  module.def("tune_malloc", &paceline::tune_malloc, "What paceline.tune_malloc() calls.");
  using paceline::backends::PacelineOptions;
  py::class_<PacelineOptions, c10::intrusive_ptr<PacelineOptions>, c10d::Backend::Options>(
      module, "Options",
      "Options of a group: the argument pg_options of init_process_group and new_group.")
      .def(py::init<>())
      .def_readwrite("staging_bytes", &PacelineOptions::staging_bytes,
                     "The size in bytes of the staging buffers of all ranks of the group together.")
      .def_readwrite(
          "single_copy_bytes", &PacelineOptions::single_copy_bytes,
          "In a scatter or an all_to_all, a rank with a part of this many bytes or more has its "
          "parts read from the memory of its process, if the system allows it. None: 4 "
          "MiB if the group has at least 3 ranks and a core for each, else never.");
  paceline::python::bind_ddp(module);
  paceline::python::log_to_python();
  paceline::distributed::register_debug_handlers();
}
