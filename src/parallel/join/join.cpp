#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/join.h>

#include "distributed/process_state.h"
#include "parallel/with_error_context.h"

namespace paceline {
namespace detail {

class JoinContext {
 public:
  JoinContext(std::vector<std::reference_wrapper<Joinable>> joinables, const JoinOptions& options)
      : joinables_(std::move(joinables)),
        options_(options),
        group_(joinables_.front().get().join_process_group()),
        active_(at::ones({get_world_size(group_)}, at::kLong)) {
    for (Joinable& one : joinables_) {
      if (one.context_ != nullptr) throw UsageError("join inside the join of the same joinable");
    }
    for (Joinable& one : joinables_) one.context_ = this;
  }
  JoinContext(const JoinContext&) = delete;
  JoinContext& operator=(const JoinContext&) = delete;
  ~JoinContext() {
    for (Joinable& one : joinables_) one.context_ = nullptr;
  }

  const JoinOptions& options() const { return options_; }
  bool all_active() const { return active_.all().item<bool>(); }
  int last_active() const { return static_cast<int>(active_.nonzero().max().item<std::int64_t>()); }

  void notify(const Joinable& who) {
    if (&who == &joinables_.front().get()) exchange(true);
  }

  void run_main_hooks() {
    while (any_goes_on()) {
      for (Joinable& one : joinables_) one.main_hook();
    }
    for (Joinable& one : joinables_) one.post_hook(last_);
  }

 private:
  bool any_goes_on() {
    bool any = false;
    parallel::with_error_context(
        "asking whether other ranks have inputs left; in join, make no other collective calls",
        [&] { any = exchange(false); }, "join");
    return any;
  }

  // Exchanges whether this rank goes on, and whether any does.
  bool exchange(bool active) {
    all_gather_into_tensor(active_, at::full({1}, active ? 1 : 0, at::kLong), {.group = group_});
    const bool any = active_.any().item<bool>();
    if (any) {
      if (options_.throw_on_early_termination) check_all_active();
      last_ = last_active();
      ++steps_;
    }
    return any;
  }

  void check_all_active() const {
    std::vector<int> ended;
    for (int rank = 0; rank < active_.numel(); ++rank) {
      if (active_[rank].item<std::int64_t>() == 0) {
        ended.push_back(distributed::global_rank_of(group_, rank));
      }
    }
    if (ended.empty()) return;
    throw Error(
        fmt::format("rank{} {} had no inputs left after {} steps, while others go on "
                    "(throw_on_early_termination)",
                    ended.size() == 1 ? "" : "s", fmt::join(ended, ", "), steps_));
  }

  std::vector<std::reference_wrapper<Joinable>> joinables_;
  JoinOptions options_;
  ProcessGroup group_;
  at::Tensor active_;  // by rank, in the step under way
  int last_ = 0;
  std::uint64_t steps_ = 0;
};

}  // namespace detail

Joinable::~Joinable() = default;

void Joinable::notify_join() {
  if (context_ != nullptr) context_->notify(*this);
}
const JoinOptions* Joinable::join_options() const {
  return context_ == nullptr ? nullptr : &context_->options();
}
int Joinable::last_active() const {
  return context_ == nullptr ? get_world_size(join_process_group()) - 1 : context_->last_active();
}

bool Joinable::all_active() const {
  return context_ == nullptr || context_->all_active();
}

void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
          const std::function<void()>& body, const JoinOptions& options) {
  if (joinables.empty()) throw UsageError("join got no joinables");
  for (const Joinable& one : joinables) {
    if (one.join_process_group().c10d() != joinables.front().get().join_process_group().c10d()) {
      throw UsageError("join got joinables of different groups; they must be of one group");
    }
  }
  for (std::size_t i = 0; i < joinables.size(); ++i) {
    for (std::size_t j = i + 1; j < joinables.size(); ++j) {
      if (&joinables[i].get() != &joinables[j].get()) continue;
      throw UsageError(fmt::format(
          "join: joinables {} and {} (counted from 0) are the same; give each joinable once", i,
          j));
    }
  }
  if (!options.enable) return body();
  detail::JoinContext context(joinables, options);
  body();
  context.run_main_hooks();
}

}  // namespace paceline
