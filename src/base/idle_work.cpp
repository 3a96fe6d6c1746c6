#include "base/idle_work.h"

namespace paceline::base {
namespace {

thread_local const std::function<void()>* work_of_thread = nullptr;
thread_local bool is_working = false;

struct Working {
  Working() { is_working = true; }
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;
  ~Working() { is_working = false; }
};

}  // namespace

void set_idle_work(const std::function<void()>* work) {
  work_of_thread = work;
}

bool has_idle_work() {
  return work_of_thread != nullptr;
}

void do_idle_work() {
  if (work_of_thread == nullptr || is_working) return;
  const Working working;
  (*work_of_thread)();
}

}  // namespace paceline::base
