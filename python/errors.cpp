#include "errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <paceline/error.h>

#include <utility>

namespace py = pybind11;

namespace paceline::python {

namespace {

// Sets the class `name` of paceline.errors as Python's error.
void set_peer_error(const char* name, const PeerError& error) {
  const py::object type = py::module_::import("paceline.errors").attr(name);
  const py::object made = type(error.what());
  made.attr("ranks") = error.ranks();
  made.attr("operation") = error.operation();
  made.attr("sequence") = error.sequence();
  PyErr_SetObject(type.ptr(), made.ptr());
}

}  // namespace

void set_python_error(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const UsageError& error) {
    PyErr_SetString(py::module_::import("paceline.errors").attr("UsageError").ptr(), error.what());
  } catch (const PeerLost& error) {
    set_peer_error("PeerLost", error);
  } catch (const Timeout& error) {
    set_peer_error("Timeout", error);
  } catch (const Mismatch& error) {
    set_peer_error("Mismatch", error);
  } catch (const PeerError& error) {
    set_peer_error("PeerError", error);
  } catch (const Error& error) {
    const py::object type = py::module_::import("torch.distributed").attr("DistBackendError");
    PyErr_SetString(type.ptr(), error.what());
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
