#include "errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <paceline/error.h>

#include <utility>

namespace py = pybind11;

namespace paceline::python {

void set_python_error(std::exception_ptr thrown) {
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

void throw_through_autograd() {
  try {
    throw;
  } catch (const Error&) {
    const py::gil_scoped_acquire gil;
    set_python_error(std::current_exception());
    torch::throw_python_error();
  } catch (...) {  // not ours
  }
}

}  // namespace paceline::python
