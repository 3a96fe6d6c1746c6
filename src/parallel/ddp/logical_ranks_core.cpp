#include "parallel/ddp/logical_ranks_core.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/hash.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"
#include "parallel/gather.h"
#include "parallel/with_error_context.h"

namespace paceline {
namespace detail {
namespace {

// Whose logical ranks' random numbers the process's default generator has.
std::atomic<const LogicalRanksCore*> open_loop = nullptr;

using Generators = std::vector<at::Generator>;

Generators copies_of(const Generators& generators) {
  Generators copies;
  for (at::Generator one : generators) {
    const std::lock_guard lock(one.mutex());
    copies.push_back(one.clone());
  }
  return copies;
}

// One after the other.
at::Tensor states_of(const Generators& generators) {
  std::vector<at::Tensor> states;
  for (at::Generator one : generators) {
    const std::lock_guard lock(one.mutex());
    states.push_back(one.get_state());
  }
  return at::cat(states);
}

// `states`: as states_of gives them. A model on another device has fewer, or more.
void set_states(const Generators& generators, const at::Tensor& states) {
  std::int64_t begin = 0;
  for (at::Generator one : generators) {
    if (begin > 0 && begin == states.numel()) return;
    const std::lock_guard lock(one.mutex());
    const std::int64_t bytes = one.get_state().numel();
    one.set_state(states.narrow(0, begin, bytes).clone());
    begin += bytes;
  }
}

// `saved`, of a model that may be on another device, and `own` where that has no state.
at::Tensor completed(const at::Tensor& saved, const at::Tensor& own) {
  const std::int64_t common = std::min(saved.numel(), own.numel());
  return at::cat({saved.narrow(0, 0, common), own.narrow(0, common, own.numel() - common)});
}

}  // namespace

LogicalRanksCore::LogicalRanksCore(ddp::Reducer& reducer, int logical_ranks, ProcessGroup group,
                                   std::vector<at::Tensor> buffers, at::Device device)
    : reducer_(&reducer),
      enabled_(logical_ranks > 0),
      group_(std::move(group)),
      buffers_(std::move(buffers)) {
  if (!enabled_) return;
  generators_ = {at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) generators_.push_back(at::globalContext().defaultGenerator(device));
  const at::Tensor seed = at::empty({1}, at::kLong);
  seed.fill_(static_cast<std::int64_t>(generators_[0].current_seed()));
  if (get_world_size(group_) > 1) ddp::broadcast_from(0, {seed}, group_);
  seed_ = static_cast<std::uint64_t>(seed.item<std::int64_t>());
  for (int k = 0; k < range().count; ++k) random_.push_back(first_random(range().first + k));
  reducer.on_leaf_complete([this](int leaf) { end_backward(leaf); });
}

ddp::Reducer& LogicalRanksCore::reducer() const {
  if (reducer_ != nullptr) return *reducer_;
  throw UsageError("the DistributedDataParallel of these logical ranks was destroyed");
}

at::Tensor LogicalRanksCore::first_random(int rank) const {
  Generators first = copies_of(generators_);
  for (at::Generator& one : first) {
    one.set_current_seed(base::splitmix(seed_ + base::splitmix(static_cast<std::uint64_t>(rank))));
  }
  return states_of(first);
}

LogicalRange LogicalRanksCore::range() const {
  const auto [first, count] = reducer().leaves().range(get_rank(group_));
  return {first, count};
}

bool LogicalRanksCore::is_any_in_loop() {
  return open_loop != nullptr;
}

std::uint64_t LogicalRanksCore::begin() {
  check_outside("a loop over logical ranks");
  if (std::exchange(was_broken_, false)) {
    throw UsageError(
        "the last loop over logical ranks was left by break or return before the backward of its "
        "last logical rank, so the step is incomplete: end training before the loop, not in it");
  }
  if (enabled_) begin_loop();
  current_ = 0;
  return ++loops_;
}

void LogicalRanksCore::begin_loop() {
  const LogicalRanksCore* none = nullptr;
  if (!open_loop.compare_exchange_strong(none, this)) {
    throw UsageError(
        "a loop over the logical ranks of another model is under way in this process: run one loop "
        "after the other");
  }
  try {
    reducer().prepare_leaves();
    if (before_loop_) before_loop_();
    random_outside_ = states_of(generators_);
    initial_random_ = random_;
    initial_buffers_ = copy_buffers();
    final_buffers_.clear();
    reducer().begin_leaves();
    enter(0);
  } catch (...) {
    if (reducer_ != nullptr) reducer_->leave_leaves();
    current_ = -1;
    open_loop = nullptr;
    throw;
  }
}

void LogicalRanksCore::enter(int index) {
  reducer().begin_leaf(index);
  set_states(generators_, random_[static_cast<std::size_t>(index)]);
  current_ = index;
}

void LogicalRanksCore::next() {
  if (!enabled_) {
    current_ = -1;
    return;
  }
  random_[static_cast<std::size_t>(current_)] = states_of(generators_);
  if (current_ + 1 < range().count) {
    set_buffers(initial_buffers_);
    return enter(current_ + 1);
  }
  reducer().end_leaves();
  end_loop();
}

void LogicalRanksCore::leave(std::uint64_t loop, bool by_exception) noexcept {
  if (!in_loop() || loop != loops_) return;
  if (!enabled_) {
    current_ = -1;
    return;
  }
  try {
    if (reducer_ != nullptr && reducer_->is_step_complete()) {
      random_[static_cast<std::size_t>(current_)] = states_of(generators_);
    } else {
      random_ = initial_random_;
      final_buffers_.clear();
      was_broken_ = !by_exception;
    }
    if (reducer_ != nullptr) reducer_->leave_leaves();
    end_loop();
  } catch (const std::exception&) {
    // An exception is on its way already, or the next loop throws one.
    current_ = -1;
    open_loop = nullptr;
  }
}

// Buffers are logical rank 0's of the step; without a step, they are as before.
void LogicalRanksCore::end_loop() {
  current_ = -1;
  open_loop = nullptr;
  set_states(generators_, random_outside_);
  set_buffers(final_buffers_.empty() ? initial_buffers_ : final_buffers_);
}

// At the end of each logical rank's synchronised backward: how many a rank runs must not matter.
void LogicalRanksCore::end_backward(int index) {
  if (index == 0 && range().first == 0) final_buffers_ = copy_buffers();
  if (index + 1 == range().count) share_buffers();
}

// All ranks get logical rank 0's. Within the step, so that an exception after it keeps no rank from
// taking part.
void LogicalRanksCore::share_buffers() {
  if (final_buffers_.empty()) final_buffers_ = copy_buffers();
  if (get_world_size(group_) == 1 || buffers_.empty()) return;
  parallel::with_error_context("copying logical rank 0's buffers at the end of a step", [&] {
    ddp::broadcast_from(reducer().leaves().sources()[0].rank, final_buffers_, group_);
  });
}

std::vector<at::Tensor> LogicalRanksCore::copy_buffers() const {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& buffer : buffers_) {
    copies.push_back(buffer.defined() ? buffer.detach().clone() : at::Tensor());
  }
  return copies;
}

void LogicalRanksCore::set_buffers(const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].defined()) buffers_[i].copy_(values[i]);
  }
}

void LogicalRanksCore::check_outside(const char* call) const {
  if (!in_loop()) return;
  throw UsageError(fmt::format("{} inside a loop over logical ranks", call));
}

std::size_t LogicalRanksCore::index_of(int rank) const {
  const auto [first, count] = range();
  if (enabled_ && rank >= first && rank < first + count) {
    return static_cast<std::size_t>(rank - first);
  }
  throw UsageError(fmt::format("logical rank {} has no state here: {}", rank,
                               enabled_ ? fmt::format("this rank runs {} from {} on", count, first)
                                        : "set DdpOptions::logical_ranks to save and load what "
                                          "belongs to logical ranks"));
}

LogicalRankState LogicalRanksCore::state(int rank) const {
  const std::size_t index = index_of(rank);
  const bool is_current = in_loop() && current() == rank;
  LogicalRankState state;
  state.random = is_current ? states_of(generators_) : random_[index].clone();
  for (const auto& [name, registered] : registered_) {
    state.registered[name] = registered.get(rank).clone();
  }
  return state;
}

void LogicalRanksCore::check_state(int rank, const LogicalRankState& state) const {
  for (const auto& [name, value] : state.registered) {
    if (registered_.contains(name)) continue;
    throw UsageError(fmt::format(
        "the state of logical rank {} has {}, which was not registered here", rank, name));
  }
  for (const auto& [name, registered] : registered_) {
    if (state.registered.contains(name)) continue;
    throw UsageError(fmt::format("the state of logical rank {} lacks {}, which was registered here",
                                 rank, name));
  }
  std::string names;
  for (const at::Generator& one : generators_) {
    names += (names.empty() ? "" : " and ") + one.device().str();
  }
  try {
    set_states(copies_of(generators_), state.random);
  } catch (const c10::Error& error) {
    throw UsageError(
        fmt::format("the random state of logical rank {} is not that of the generator of {}: {}",
                    rank, names, error.what_without_backtrace()));
  }
}

void LogicalRanksCore::set_registered(int rank, const LogicalRankState& state) const {
  for (const auto& [name, registered] : registered_) {
    registered.set(rank, state.registered.at(name).clone());
  }
}

void LogicalRanksCore::set_state(int rank, const LogicalRankState& state) {
  const std::size_t index = index_of(rank);
  check_state(rank, state);
  random_[index] = completed(state.random, random_[index]);
  if (in_loop() && current() == rank) set_states(generators_, random_[index]);
  set_registered(rank, state);
}

void LogicalRanksCore::register_state(const std::string& name, Registered registered) {
  if (name.empty()) throw UsageError("register_state(): the name is empty");
  if (!registered.get || !registered.set) {
    throw UsageError(fmt::format("register_state({}): it needs both functions", name));
  }
  if (!registered_.emplace(name, std::move(registered)).second) {
    throw UsageError(fmt::format(
        "register_state({}): the name is in use; choose another one (of a LogicalDataLoader, it is "
        "the constructor's last argument)",
        name));
  }
}

// A dictionary of logical ranks, each of the names of its tensors.
std::string LogicalRanksCore::pack_states() const {
  c10::Dict<std::int64_t, c10::Dict<std::string, at::Tensor>> states;
  for (int k = 0; k < range().count; ++k) {
    const LogicalRankState own = state(range().first + k);
    c10::Dict<std::string, at::Tensor> values;
    values.insert("", own.random);
    for (const auto& [name, value] : own.registered) values.insert(name, value);
    states.insert(range().first + k, values);
  }
  const std::vector<char> bytes = torch::jit::pickle_save(states);
  return {bytes.begin(), bytes.end()};
}

// The states of the logical ranks in `range`.
std::map<int, LogicalRankState> LogicalRanksCore::unpack_states(
    const std::vector<std::string>& packed, const LogicalRange& range) const {
  std::map<int, LogicalRankState> states;
  for (const std::string& of_rank : packed) {
    const auto all = torch::jit::pickle_load({of_rank.begin(), of_rank.end()}).toGenericDict();
    for (const auto& entry : all) {
      const auto rank = static_cast<int>(entry.key().toInt());
      if (rank < range.first || rank >= range.first + range.count) continue;
      LogicalRankState& state = states[rank];
      for (const auto& value : entry.value().toGenericDict()) {
        const std::string name = value.key().toStringRef();
        (name.empty() ? state.random : state.registered[name]) = value.value().toTensor();
      }
      check_state(rank, state);
    }
  }
  return states;
}

// Throws UsageError on every rank if one has an error.
void LogicalRanksCore::throw_together(const std::string& error, const char* what) const {
  const auto errors = all_gather_bytes(error, {.group = group_});
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    throw UsageError(fmt::format("assign(): {} of rank {}: {}", what,
                                 distributed::global_rank_of(group_, static_cast<int>(rank)),
                                 errors[rank]));
  }
}

void LogicalRanksCore::assign(const LogicalRange& wanted) {
  check_outside("assign()");
  if (!enabled_) throw UsageError("assign() needs DdpOptions::logical_ranks");
  reducer().prepare_leaves();
  const auto text_of = [](const auto& action) {
    try {
      action();
    } catch (...) {
      return distributed::current_exception_text();
    }
    return std::string();
  };
  std::string own;
  throw_together(text_of([&] { own = pack_states(); }), "cannot read the states");
  const auto ranges = gather_ranges(wanted);
  const auto packed = all_gather_bytes(own, {.group = group_});
  std::map<int, LogicalRankState> states;
  throw_together(text_of([&] { states = unpack_states(packed, wanted); }),
                 "cannot use the new states");
  const LogicalRange before = range();
  reducer().set_leaves(ranges);
  random_.clear();
  for (const auto& [rank, state] : states) random_.push_back(state.random);
  throw_together(text_of([&] {
                   for (const auto& [rank, state] : states) {
                     const bool was_here =
                         rank >= before.first && rank < before.first + before.count;
                     if (!was_here) set_registered(rank, state);
                   }
                 }),
                 "cannot set the new states");
}

// What each rank wants. Throws UsageError, the same on every rank, unless each logical rank is
// wanted once.
std::vector<shm::LeafRange> LogicalRanksCore::gather_ranges(const LogicalRange& wanted) const {
  const at::Tensor mine = at::tensor({wanted.first, wanted.count}, at::kLong);
  const at::Tensor all = parallel::gather(mine, group_);
  std::vector<shm::LeafRange> ranges;
  std::vector<int> times(static_cast<std::size_t>(total()));
  std::string text;
  bool fits = true;
  for (int rank = 0; rank < get_world_size(group_); ++rank) {
    const auto first = all[rank][0].item<std::int64_t>();
    const auto count = all[rank][1].item<std::int64_t>();
    text += fmt::format("{}rank {} wants [{}, {})", rank == 0 ? "" : ", ",
                        distributed::global_rank_of(group_, rank), first, first + count);
    fits = fits && count >= 1 && first >= 0 && first <= total() && count <= total() - first;
    for (std::int64_t one = first; fits && one < first + count; ++one) {
      ++times[static_cast<std::size_t>(one)];
    }
    ranges.push_back({static_cast<int>(first), static_cast<int>(count)});
  }
  if (fits && std::ranges::all_of(times, [](int of) { return of == 1; })) return ranges;
  throw UsageError(
      fmt::format("assign(): {}: each of the {} logical ranks must be run by one rank, and each "
                  "rank must run at least one",
                  text, total()));
}

}  // namespace detail

LogicalRanks::LogicalRanks(std::shared_ptr<detail::LogicalRanksCore> core)
    : core_(std::move(core)) {}

LogicalRanks::Iterator::Iterator(std::shared_ptr<detail::LogicalRanksCore> core)
    : core_(std::move(core)), loop_(core_->begin()), exceptions_(std::uncaught_exceptions()) {}

LogicalRanks::Iterator::~Iterator() {
  if (core_ != nullptr) core_->leave(loop_, std::uncaught_exceptions() > exceptions_);
}

LogicalRanks::Iterator LogicalRanks::begin() {
  return Iterator(core_);
}

int LogicalRanks::Iterator::operator*() const {
  return core_->current();
}

LogicalRanks::Iterator& LogicalRanks::Iterator::operator++() {
  core_->next();
  return *this;
}

bool LogicalRanks::Iterator::operator==(Sentinel) const {
  return !core_->in_loop();
}

int LogicalRanks::total() const {
  return core_->total();
}

LogicalRange LogicalRanks::range() const {
  return core_->range();
}

void LogicalRanks::assign(const LogicalRange& range) {
  core_->assign(range);
}

LogicalRankState LogicalRanks::state(int rank) const {
  return core_->state(rank);
}

void LogicalRanks::set_state(int rank, const LogicalRankState& state) {
  core_->set_state(rank, state);
}

void LogicalRanks::unregister_state(const std::string& name) {
  core_->unregister_state(name);
}

void LogicalRanks::register_state(const std::string& name, std::function<at::Tensor(int)> get,
                                  std::function<void(int, const at::Tensor&)> set) {
  core_->register_state(name, {std::move(get), std::move(set)});
}

}  // namespace paceline
