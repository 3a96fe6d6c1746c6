// paceline._C: makes the backend `paceline` for torch.distributed.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <paceline/error.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "backends/paceline/backend.h"

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
                                         std::vector<int> world_ranks, std::size_t staging_bytes) {
  distributed::BackendRequest request{.store = std::move(store),
                                      .rank = rank,
                                      .size = size,
                                      .timeout = timeout,
                                      .group_name = std::move(group_name),
                                      .options = paceline::PacelineOptions{staging_bytes},
                                      .members = std::move(world_ranks)};
  return c10::make_intrusive<PythonBackend>(backends::form_region(std::move(request)));
}

// Raises torch.distributed's own errors; errors about other ranks get attributes beside their text.
void translate(std::exception_ptr thrown) {
  if (!thrown) return;
  const auto make = [](const std::exception& error) {
    return py::module_::import("torch.distributed").attr("DistBackendError")(error.what());
  };
  const auto set = [](const py::object& error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  };
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const UsageError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const PeerError& error) {
    const py::object made = make(error);
    made.attr("ranks") = error.ranks();
    made.attr("operation") = error.operation();
    made.attr("sequence") = error.sequence();
    set(made);
  } catch (const Error& error) {
    set(make(error));
  }
}

}  // namespace
}  // namespace paceline::python

PYBIND11_MODULE(_C, module) {
  py::module_::import(
      "torch._C._distributed_c10d");  // registers the types of arguments and results
  py::register_exception_translator(&paceline::python::translate);
  module.def("create", &paceline::python::create, py::arg("store"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("group_name"), py::arg("world_ranks"),
             py::arg("staging_bytes"), py::call_guard<py::gil_scoped_release>());
  using paceline::backends::PacelineOptions;
  py::class_<PacelineOptions, c10::intrusive_ptr<PacelineOptions>, c10d::Backend::Options>(
      module, "Options")
      .def(py::init<>())
      .def_readwrite("staging_bytes", &PacelineOptions::staging_bytes);
}
