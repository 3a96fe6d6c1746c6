#include "mpi/group.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/idle_work.h"
#include "base/pause.h"
#include "base/wait_report.h"
#include "shm/collectives/group.h"
#include "shm/kernels/kernels.h"

namespace paceline::mpi {

using shm::DataType;
using shm::Input;
using shm::Operation;
using shm::Output;
using shm::RankSet;
using shm::ReduceOp;

namespace {

using namespace std::chrono_literals;

// Of the messages of one call.
constexpr std::uint32_t kTag = 0;

// A wait that is longer is noted, so that reports can name the ranks that are late.
constexpr auto kLongWait = 1s;
// Past its deadline a rank waits for so long until the others have noted that they wait too.
constexpr auto kQuestionTime = 1500ms;

// Equally large parts, one after the other: in their own memory if they are so there, else in a
// copy.
template <typename Part>
class Contiguous {
 public:
  Contiguous(std::span<const Part> parts, std::size_t bytes, bool own_memory = true)
      : parts_(parts), bytes_(bytes) {
    const auto* const begin = static_cast<const std::byte*>(parts.front().data);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      own_memory = own_memory && parts[i].data == begin + i * bytes;
    }
    if (!own_memory) copy_ = std::make_unique_for_overwrite<std::byte[]>(parts.size() * bytes);
  }

  std::byte* data() const {
    return copy_ ? copy_.get()
                 : static_cast<std::byte*>(
                       const_cast<void*>(static_cast<const void*>(parts_.front().data)));
  }
  void copy_in() const {
    for (std::size_t i = 0; copy_ && i < parts_.size(); ++i) {
      std::memcpy(copy_.get() + i * bytes_, parts_[i].data, bytes_);
    }
  }
  void copy_out() const requires std::same_as<Part, Output> {
    for (std::size_t i = 0; copy_ && i < parts_.size(); ++i) {
      std::memcpy(parts_[i].data, copy_.get() + i * bytes_, bytes_);
    }
  }

 private:
  std::span<const Part> parts_;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> copy_;
};
template <typename Part, std::size_t extent>
Contiguous(std::span<Part, extent>, std::size_t, bool = true)
    -> Contiguous<std::remove_const_t<Part>>;

template <typename Part>
bool all_have(std::span<const Part> parts, std::size_t count) {
  return std::ranges::all_of(parts, [&](const Part& part) { return part.count == count; });
}

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace

// The wait of a comparison.
class Group::Wait final : public shm::WaitContext {
 public:
  Wait(Group& group, Comparison& comparison, std::uint32_t number)
      : WaitContext(group.context(), group.deadline_),
        group_(group),
        comparison_(comparison),
        number_(number) {}

  RankSet missing() const override { return {}; }
  RankSet missing_on_other_nodes() const override {
    RankSet missing = noted_ ? group_.arrivals_->missing(group_.call_.sequence) : RankSet();
    if (missing.empty()) missing = RankSet::all(group_.size_) - RankSet{group_.rank_};
    return group_.global_ranks_.of(missing);
  }
  std::string describe() const override { return group_.describe_call(); }
  std::string describe_on_other_nodes(const RankSet& ranks) const override {
    return group_.global_ranks_.describe_global(ranks);
  }
  bool may_learn_more() override {
    if (!learning_) learning_ = base::Deadline::after(kQuestionTime);
    note();
    return !learning_->expired();
  }
  void check(int /*peer*/) const override {
    if (std::chrono::steady_clock::now() - begin_ > kLongWait) note();
  }
  bool polls() const override { return true; }
  bool poll() override {
    const bool complete = group_.test(comparison_.requests);
    if (complete) {
      group_.compared_.store(number_, std::memory_order_release);
    } else {
      base::do_idle_work();
      pause_.rest();
    }
    return !complete;
  }

 private:
  void note() const {
    if (!std::exchange(noted_, true)) group_.arrivals_->note(group_.call_.sequence);
  }

  Group& group_;
  Comparison& comparison_;
  std::uint32_t number_;
  base::Pause pause_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  mutable bool noted_ = false;
  std::optional<base::Deadline> learning_;
};

Group::Group(std::shared_ptr<shm::Region> region, shm::GlobalRanks ranks, Runtime& runtime,
             std::unique_ptr<Communicator> communicator, std::unique_ptr<Arrivals> arrivals)
    : Collectives(region->options().timeout),
      region_(std::move(region)),
      global_ranks_(std::move(ranks)),
      runtime_(runtime),
      communicator_(std::move(communicator)),
      arrivals_(std::move(arrivals)),
      rank_(communicator_->rank()),
      size_(communicator_->size()) {}

Group::~Group() {
  if (unfinished_.empty() && !region_->in_forked_child()) {
    try {
      runtime_.call([&](Library&) { communicator_.reset(); });
      return;
    } catch (...) {
      // MPI is finalized: nothing can be freed.
    }
  }
  std::ignore = communicator_.release();
  std::ignore = new (std::nothrow) std::vector<std::shared_ptr<Comparison>>(std::move(unfinished_));
}

std::string Group::describe_call() const {
  return fmt::format("{}, call {} of group {}", describe(call_, global_ranks_), call_.sequence,
                     region_->options().name);
}

void Group::fail(const RankSet& ranks, const std::string& text) {
  region_->fail(
      {shm::FailureKind::mismatch, global_ranks_.of(ranks),
       fmt::format("{}; call {} of group {}", text, call_.sequence, region_->options().name)},
      context());
}

void Group::fail_in_mpi(const char* why) {
  const std::string text = fmt::format("MPI failed in {}: {}", describe_call(), why);
  region_->abort(text);
  throw Error(text);
}

bool Group::test(Requests& requests) {
  return runtime_.call([&](Library&) { return communicator_->test(requests); });
}

template <typename Start>
void Group::run(const std::shared_ptr<Comparison>& comparison, Start start) {
  const std::uint32_t number = compared_.load(std::memory_order_relaxed) + 1;
  try {
    runtime_.call([&](Library&) { start(*communicator_); });
    Wait wait(*this, *comparison, number);
    region_->await(compared_, number, region_->rank(), wait);
  } catch (const std::exception& error) {
    if (!comparison->requests.empty()) {
      unfinished_.push_back(comparison);
      runtime_.do_not_finalize();
    }
    if (dynamic_cast<const Error*>(&error) != nullptr) throw;
    fail_in_mpi(error.what());
  }
}

template <typename Start>
void Group::run(Start start) {
  try {
    Requests requests;
    runtime_.call([&](Library&) { start(*communicator_, requests); });
    base::WaitReport report;
    while (!test(requests)) {
      base::do_idle_work();
      ::sched_yield();
      report.check([&](const std::string& waited, auto) {
        return base::WaitReport::Text{
            fmt::format("{} waited {} for MPI in {}", global_ranks_.describe({rank_}), waited,
                        describe_call()),
            describe_call()};
      });
    }
  } catch (const std::exception& error) {
    runtime_.do_not_finalize();
    if (dynamic_cast<const Error*>(&error) != nullptr) throw;
    fail_in_mpi(error.what());
  }
}

void Group::begin(shm::CollectiveFingerprint call) {
  check_arguments(call, size_);
  call.sequence = call_.sequence + 1;
  region_->check_usable({name(call.operation), call.sequence});
  call_ = call;
  begin_deadline();
  compare_calls();
}

// Of the ranks that come in time, all find the same: whether the greatest of each word is the
// least, too.
void Group::compare_calls() {
  const auto of_kind =
      static_cast<std::uint64_t>(call_.operation) | static_cast<std::uint64_t>(call_.type) << 8 |
      static_cast<std::uint64_t>(call_.op) << 16 | static_cast<std::uint64_t>(call_.uneven) << 24 |
      static_cast<std::uint64_t>(static_cast<std::uint32_t>(call_.root)) << 32;
  auto comparison = std::make_shared<Comparison>();
  for (const std::uint64_t word : {of_kind, call_.count, call_.sequence}) {
    comparison->own.push_back(static_cast<std::int64_t>(word));
    comparison->own.push_back(static_cast<std::int64_t>(~word));
  }
  comparison->all.resize(comparison->own.size());
  run(comparison, [&](Communicator& communicator) {
    communicator.all_reduce(comparison->own.data(), comparison->all.data(), comparison->own.size(),
                            DataType::int64, ReduceOp::max, comparison->requests);
  });
  bool same = true;
  for (std::size_t word = 0; word < comparison->all.size(); word += 2) {
    same = same && comparison->all[word] == ~comparison->all[word + 1];
  }
  if (same) return;

  auto calls = std::make_shared<Comparison>();
  constexpr std::size_t kWords = sizeof(call_) / sizeof(std::int64_t);
  static_assert(sizeof(call_) % sizeof(std::int64_t) == 0);
  calls->own.resize(kWords);
  std::memcpy(calls->own.data(), &call_, sizeof(call_));
  calls->all.resize(kWords * static_cast<std::size_t>(size_));
  run(calls, [&](Communicator& communicator) {
    communicator.all_gather(calls->own.data(), calls->all.data(), sizeof(call_), calls->requests);
  });
  std::vector<shm::CollectiveFingerprint> all(static_cast<std::size_t>(size_));
  std::memcpy(static_cast<void*>(all.data()), calls->all.data(), all.size() * sizeof(call_));
  const auto found = explain_disagreement(all, global_ranks_);
  fail(found.ranks, found.text);
}

bool Group::compare_splits(std::span<const Input> to, std::span<const Output> from) {
  const auto all = static_cast<std::size_t>(size_);
  auto comparison = std::make_shared<Comparison>();
  for (std::size_t rank = 0; rank < all; ++rank) {
    comparison->own.push_back(static_cast<std::int64_t>(to[to.size() == 1 ? 0 : rank].count));
  }
  for (std::size_t rank = 0; rank < all; ++rank) {
    comparison->own.push_back(static_cast<std::int64_t>(from[from.size() == 1 ? 0 : rank].count));
  }
  comparison->all.resize(all * comparison->own.size());
  run(comparison, [&](Communicator& communicator) {
    communicator.all_gather(comparison->own.data(), comparison->all.data(),
                            comparison->own.size() * sizeof(std::int64_t), comparison->requests);
  });
  const std::vector<std::uint64_t> counts(comparison->all.begin(), comparison->all.end());
  std::vector<shm::SplitRow> rows;
  for (std::size_t rank = 0; rank < all; ++rank) {
    const auto row = std::span(counts).subspan(rank * 2 * all, 2 * all);
    rows.push_back({row.first(all), row.last(all)});
  }
  const auto found = shm::compare_splits(rows, global_ranks_);
  if (!found.ranks.empty()) {
    fail(found.ranks, describe(call_, global_ranks_) + ": " + found.text);
  }
  return std::ranges::all_of(counts, [&](std::uint64_t count) { return count == counts.front(); });
}

// Whether the parts of all ranks together are too large for one operation of MPI.
bool Group::is_large(std::size_t bytes) const {
  return bytes > Communicator::kMaxBytes / static_cast<std::size_t>(size_);
}

// The comparison is a barrier.
void Group::barrier() {
  begin({.operation = Operation::barrier});
}

void Group::broadcast(void* data, std::size_t count, DataType type, int root) {
  begin({.operation = Operation::broadcast, .type = type, .root = root, .count = count});
  if (count == 0) return;
  run([&](Communicator& communicator, Requests& requests) {
    communicator.broadcast(data, count * element_size(type), root, requests);
  });
}

void Group::divide(void* sum, std::size_t count, DataType type) const {
  const void* const source = sum;
  shm::reduce(type, ReduceOp::avg, {.sources = {&source, 1}}, static_cast<double>(size_), {&sum, 1},
              count);
}

void Group::all_reduce(const void* input, void* output, std::size_t count, DataType type,
                       ReduceOp op) {
  begin({.operation = Operation::all_reduce, .type = type, .op = op, .count = count});
  if (count == 0) return;
  run([&](Communicator& communicator, Requests& requests) {
    communicator.all_reduce(input, output, count, type, op, requests);
  });
  if (op == ReduceOp::avg) divide(output, count, type);
}

void Group::reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
                   int root) {
  begin({.operation = Operation::reduce, .type = type, .op = op, .root = root, .count = count});
  if (count == 0) return;
  run([&](Communicator& communicator, Requests& requests) {
    communicator.reduce(input, output, count, type, op, root, requests);
  });
  if (op == ReduceOp::avg && rank_ == root) divide(output, count, type);
}

void Group::exchange(std::span<const Input> inputs, std::span<const Output> outputs,
                     std::size_t element) {
  run([&](Communicator& communicator, Requests& requests) {
    for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
      const auto [data, count] = outputs[rank];
      if (static_cast<int>(rank) == rank_ || count == 0) continue;
      communicator.receive(data, count * element, static_cast<int>(rank), kTag, requests);
    }
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      const auto [data, count] = inputs[rank];
      if (static_cast<int>(rank) == rank_ || count == 0) continue;
      communicator.send(data, count * element, static_cast<int>(rank), kTag, requests);
    }
  });
  const auto own = static_cast<std::size_t>(rank_);
  if (own < inputs.size() && own < outputs.size()) {
    copy(outputs[own].data, inputs[own].data, outputs[own].count * element);
  }
}

void Group::gather(Input input, std::span<const Output> outputs, DataType type, int root) {
  begin({.operation = Operation::gather, .type = type, .root = root, .count = input.count});
  std::vector<Input> inputs(static_cast<std::size_t>(size_), Input{nullptr, 0});
  inputs[static_cast<std::size_t>(root)] = input;
  exchange(inputs, rank_ == root ? outputs : std::span<const Output>(), element_size(type));
}

void Group::scatter(std::span<const Input> inputs, Output output, DataType type, int root) {
  begin({.operation = Operation::scatter, .type = type, .root = root, .count = output.count});
  std::vector<Output> outputs(static_cast<std::size_t>(size_), Output{nullptr, 0});
  outputs[static_cast<std::size_t>(root)] = output;
  exchange(rank_ == root ? inputs : std::span<const Input>(), outputs, element_size(type));
}

void Group::all_gather(Input input, std::span<const Output> outputs, DataType type) {
  const bool even = all_have(outputs, input.count);
  begin({.operation = Operation::all_gather,
         .type = type,
         .uneven = static_cast<std::uint8_t>(!even),
         .count = even ? input.count : 0});
  if (!even) compare_splits({&input, 1}, outputs);
  const std::size_t element = element_size(type);
  const std::size_t bytes = input.count * element;
  if (!even || is_large(bytes)) {
    return exchange(std::vector<Input>(outputs.size(), input), outputs, element);
  }
  if (bytes == 0) return;
  const Contiguous to(outputs, bytes);
  run([&](Communicator& communicator, Requests& requests) {
    communicator.all_gather(input.data, to.data(), bytes, requests);
  });
  to.copy_out();
}

void Group::reduce_scatter(std::span<const Input> inputs, Output output, DataType type,
                           ReduceOp op) {
  const bool even = all_have(inputs, output.count);
  begin({.operation = Operation::reduce_scatter,
         .type = type,
         .op = op,
         .uneven = static_cast<std::uint8_t>(!even),
         .count = even ? output.count : 0});
  if (!even) compare_splits(inputs, {&output, 1});
  const std::size_t element = element_size(type);
  const std::size_t bytes = output.count * element;
  if (!even || is_large(bytes)) {
    run([&](Communicator& communicator, Requests& requests) {
      for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
        const auto [data, count] = inputs[rank];
        if (count == 0) continue;
        const auto root = static_cast<int>(rank);
        communicator.reduce(data, root == rank_ ? output.data : nullptr, count, type, op, root,
                            requests);
      }
    });
  } else if (bytes > 0) {
    const bool in_place = inputs[static_cast<std::size_t>(rank_)].data == output.data;
    const Contiguous from(inputs, bytes, !in_place);
    from.copy_in();
    run([&](Communicator& communicator, Requests& requests) {
      communicator.reduce_scatter(from.data(), output.data, output.count, type, op, requests);
    });
  }
  if (op == ReduceOp::avg && output.count > 0) divide(output.data, output.count, type);
}

void Group::all_to_all(std::span<const Input> inputs, std::span<const Output> outputs,
                       DataType type) {
  begin({.operation = Operation::all_to_all, .type = type, .uneven = 1});
  const bool even = compare_splits(inputs, outputs);
  const std::size_t element = element_size(type);
  const std::size_t bytes = inputs.front().count * element;
  // MPICH refuses one rank that gives itself a tensor in place.
  if (!even || is_large(bytes) || size_ == 1) return exchange(inputs, outputs, element);
  if (bytes == 0) return;
  const Contiguous from(inputs, bytes);
  const Contiguous to(outputs, bytes);
  from.copy_in();
  run([&](Communicator& communicator, Requests& requests) {
    communicator.all_to_all(from.data(), to.data(), bytes, requests);
  });
  to.copy_out();
}

}  // namespace paceline::mpi
