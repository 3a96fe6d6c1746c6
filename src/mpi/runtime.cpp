#include "mpi/runtime.h"

#include <array>
#include <exception>

#include <paceline/error.h>

#include "mpi/load.h"
#include "shm/kernels/kernels.h"

namespace paceline::mpi {
namespace {

void reduce_two(shm::DataType type, shm::ReduceOp op, const void* in, void* inout,
                std::size_t count) {
  const std::array<const void*, 2> sources{in, inout};
  shm::reduce(type, op, sources, {&inout, 1}, count);
}

}  // namespace

Runtime& Runtime::get(const std::optional<std::string>& name) {
  // Never destroyed, since MPI ends at exit.
  static Runtime* const runtime = [&] {
    Library& library = load(name);
    try {
      library.start(&reduce_two);
    } catch (const std::exception& error) {
      throw UsageError(std::string("the backend mpi cannot use MPI: ") + error.what());
    }
    if (library.threads() == Library::Threads::one) {
      throw UsageError(
          "the backend mpi calls MPI on threads of its own: initialise MPI with MPI_Init_thread "
          "and "
          "MPI_THREAD_MULTIPLE in place of MPI_Init, or leave it to the backend; the backend "
          "paceline "
          "needs neither");
    }
    return new Runtime(library);
  }();
  return *runtime;
}

void Runtime::check_not_finalized() const {
  if (!library_.is_finalized()) return;
  throw UsageError("the backend mpi is used after MPI_Finalize: end the world before it");
}

}  // namespace paceline::mpi
