#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <utility>

#include <paceline/distributed.h>

namespace paceline::comm_hooks {

// While it lives, hooks on this thread see the model that runs them. A hook may run another model's
// backward.
class RunningHook {
 public:
  using AfterLast = std::function<void(std::function<void()> body)>;

  // `parameters`: the numbers, in the model, of the parameters in the hook's bucket.
  // `models_may_differ` becomes true in let_models_differ.
  RunningHook(const ProcessGroup& group, std::span<const std::size_t> parameters,
              AfterLast after_last, bool& models_may_differ)
      : group_(group),
        parameters_(parameters),
        after_last_(std::move(after_last)),
        models_may_differ_(models_may_differ),
        outer_(std::exchange(current_, this)) {}
  RunningHook(const RunningHook&) = delete;
  RunningHook& operator=(const RunningHook&) = delete;
  ~RunningHook() { current_ = outer_; }

  // Null if no model runs a hook on this thread.
  static const RunningHook* current() { return current_; }

  // For the hook of this name. Throws UsageError if no model runs a hook on this thread.
  static const RunningHook& require(const char* hook);

  const ProcessGroup& group() const { return group_; }
  std::span<const std::size_t> parameters() const { return parameters_; }
  // Has `body` run on this thread once the hooks of all of the step's buckets have returned.
  void after_last(std::function<void()> body) const { after_last_(std::move(body)); }
  // For hooks that may return another result on each rank: the models are not compared any more.
  void let_models_differ() const { models_may_differ_ = true; }

 private:
  inline static thread_local const RunningHook* current_ = nullptr;
  const ProcessGroup& group_;
  std::span<const std::size_t> parameters_;
  AfterLast after_last_;
  bool& models_may_differ_;
  const RunningHook* outer_;
};

}  // namespace paceline::comm_hooks
