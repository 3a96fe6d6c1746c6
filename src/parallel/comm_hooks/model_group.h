#pragma once

#include <utility>

#include <paceline/distributed.h>

namespace paceline::comm_hooks {

// While it lives, hooks on this thread see `group`: the group of the model that runs them. A hook
// may run another model's backward.
class ModelGroup {
 public:
  explicit ModelGroup(const ProcessGroup& group) : outer_(std::exchange(current_, &group)) {}
  ModelGroup(const ModelGroup&) = delete;
  ModelGroup& operator=(const ModelGroup&) = delete;
  ~ModelGroup() { current_ = outer_; }

  // Null if no model runs a hook on this thread.
  static const ProcessGroup* current() { return current_; }

 private:
  inline static thread_local const ProcessGroup* current_ = nullptr;
  const ProcessGroup* outer_;
};

}  // namespace paceline::comm_hooks
