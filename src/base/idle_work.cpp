#include "base/idle_work.h"

#include <utility>

namespace paceline::base {
namespace {

struct IdleWork {
  std::function<void()> function;
  bool runs = false;
};

thread_local IdleWork work_of_thread;

}  // namespace

void set_idle_work(std::function<void()> work) {
  work_of_thread.function = std::move(work);
}

bool has_idle_work() {
  return work_of_thread.function != nullptr;
}

void do_idle_work() {
  if (!work_of_thread.function || work_of_thread.runs) return;
  work_of_thread.runs = true;
  work_of_thread.function();
  work_of_thread.runs = false;
}

}  // namespace paceline::base
