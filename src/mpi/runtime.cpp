#include "mpi/runtime.h"

#include <array>
#include <exception>
#include <future>
#include <memory>
#include <utility>

#include <paceline/error.h>

#include "base/idle_work.h"
#include "mpi/load.h"
#include "shm/kernels/kernels.h"

namespace paceline::mpi {
namespace {

void reduce_two(shm::DataType type, shm::ReduceOp op, const void* in, void* inout,
                std::size_t count) {
  const std::array<const void*, 2> sources{in, inout};
  shm::reduce(type, op, sources, {&inout, 1}, count);
}

constexpr const char* kOtherThread =
    "the backend mpi: MPI was initialised without MPI_THREAD_MULTIPLE, so worlds and groups over "
    "it are "
    "made on the thread that initialised it";

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
    const bool one = library.threads() == Library::Threads::one;
    if (one && !library.is_main_thread()) throw UsageError(kOtherThread);
    auto* const made = new Runtime(library);
    if (one) {
      made->owner_ = std::this_thread::get_id();
      base::set_idle_work(&made->idle_work_);
    }
    return made;
  }();
  return *runtime;
}

void Runtime::check_may_call_here() const {
  if (has_owner() && owner_ != std::this_thread::get_id()) throw UsageError(kOtherThread);
}

void Runtime::hand_over(const std::function<void()>& task) {
  const auto end = std::make_shared<std::promise<void>>();
  auto ended = end->get_future();
  {
    const std::lock_guard lock(handed_over_mutex_);
    handed_over_.push_back([end, &task] {
      try {
        task();
        end->set_value();
      } catch (...) {
        end->set_exception(std::current_exception());
      }
    });
  }
  ended.get();
}

void Runtime::progress() {
  if (process_.is_forked_child()) return;
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(handed_over_mutex_);
    tasks = std::exchange(handed_over_, {});
  }
  for (const auto& task : tasks) task();
  for (const auto& [key, work] : works_) work();
}

void Runtime::check_not_finalized() const {
  if (!library_.is_finalized()) return;
  throw UsageError("the backend mpi is used after MPI_Finalize: end the world before it");
}

}  // namespace paceline::mpi
