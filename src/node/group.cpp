#include "node/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include <paceline/error.h>

namespace paceline::node {
namespace {

constexpr std::array kKindNames{"barrier", "broadcast", "all_reduce", "all_gather",
                                "reduce_scatter"};

const char* kind_name(std::uint8_t kind) {
  return kind < kKindNames.size() ? kKindNames[kind] : "an unknown operation";
}

bool same_call(const Call& a, const Call& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root &&
         a.count == b.count;
}

}  // namespace

// Waits for a step of the current call.
class Group::StepWait : public Waiting {
 public:
  explicit StepWait(Group& group)
      : Waiting({kind_name(group.call_.kind), group.sequence_}, group.patience_), group_(group) {}

  std::uint64_t missing() const override {
    std::uint64_t ranks = 0;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const Word& word = group_.region_->slot(rank, group_.step_).step;
      if (!Region::reached(word, group_.step_)) ranks |= std::uint64_t{1} << rank;
    }
    return ranks;
  }
  std::string describe() const override {
    return fmt::format("{}, call {} of group {}", group_.describe(group_.call_), group_.sequence_,
                       group_.region_->options().name);
  }

 private:
  const Group& group_;
};

Group::Group(std::shared_ptr<Region> region)
    : region_(std::move(region)), patience_{region_->options().timeout} {}

void Group::begin(Kind kind, std::size_t count, DataType type, ReduceOp op, int root) {
  call_ = {static_cast<std::uint8_t>(kind),
           static_cast<std::uint8_t>(type),
           static_cast<std::uint8_t>(op),
           root,
           count,
           Call::kNotShared};
  ++sequence_;
  patience_.deadline.reset();
  region_->check_usable({kind_name(call_.kind), sequence_});
}

void Group::first_step(std::uint64_t offset) {
  call_.offset = offset;
  region_->slot(rank(), step_ + 1).call = call_;
  step();
  check_agreement();
}

void Group::step() {
  ++step_;
  region_->publish(region_->slot(rank(), step_).step, step_);
  StepWait waiting(*this);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) region_->await(region_->slot(peer, step_).step, step_, peer, waiting);
  }
}

void Group::check_agreement() {
  bool agree = true;
  for (int peer = 0; peer < size(); ++peer) {
    agree = agree && same_call(region_->slot(peer, step_).call, call_);
  }
  if (agree) return;

  // In the order of the first rank that made each call; every rank composes the same sentence.
  std::vector<std::pair<std::string, std::uint64_t>> parties;
  for (int peer = 0; peer < size(); ++peer) {
    const std::string made = describe(region_->slot(peer, step_).call);
    const auto party = std::find_if(parties.begin(), parties.end(),
                                    [&](const auto& one) { return one.first == made; });
    const std::uint64_t bit = std::uint64_t{1} << peer;
    if (party != parties.end()) {
      party->second |= bit;
    } else {
      parties.emplace_back(made, bit);
    }
  }
  std::string text;
  std::uint64_t largest = 0;
  for (const auto& [made, ranks] : parties) {
    text += fmt::format("{}{}{} {}", text.empty() ? "" : ", ",
                        describe_ranks(region_->numbers().list(ranks)),
                        text.empty() ? " called" : "", made);
    if (std::popcount(ranks) > std::popcount(largest)) largest = ranks;
  }
  const std::uint64_t all = size() == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << size()) - 1;
  const bool majority = 2 * std::popcount(largest) > size();
  region_->fail({FailureKind::mismatch, majority ? all & ~largest : all,
                 fmt::format("{}; call {} of group {}", text, sequence_, region_->options().name)},
                {kind_name(call_.kind), sequence_});
}

std::string Group::describe(const Call& call) const {
  std::string text = kind_name(call.kind);
  const auto kind = static_cast<Kind>(call.kind);
  if (kind == Kind::barrier) return text;
  text += fmt::format(" of {} {}", call.count, name(static_cast<DataType>(call.type)));
  if (kind == Kind::broadcast)
    text += fmt::format(" from rank {}", region_->numbers().of(call.root));
  if (kind == Kind::all_reduce || kind == Kind::reduce_scatter) {
    const auto op = static_cast<ReduceOp>(call.op);
    if (op != ReduceOp::sum) text += fmt::format(" with {}", name(op));
  }
  return text;
}

std::uint64_t Group::offset_of(const void* pointer, std::size_t bytes) const {
  return region_->shared_offset(pointer, bytes).value_or(Call::kNotShared);
}

std::byte* Group::resolve_or_fail(int peer, std::size_t bytes) {
  const std::uint64_t offset = region_->slot(peer, step_).call.offset;
  if (offset == Call::kNotShared) return nullptr;
  if (std::byte* const address = region_->resolve(peer, offset, bytes)) return address;
  region_->fail({FailureKind::mismatch, std::uint64_t{1} << peer,
                 fmt::format("rank {} published memory that is not its own (offset {}) in {}, call "
                             "{} of group {}",
                             region_->numbers().of(peer), offset, describe(call_), sequence_,
                             region_->options().name)},
                {kind_name(call_.kind), sequence_});
}

std::vector<void*> Group::shared_tensors(std::size_t bytes) {
  std::vector<void*> tensors;
  for (int peer = 0; peer < size(); ++peer) {
    std::byte* const tensor = resolve_or_fail(peer, bytes);
    if (tensor == nullptr) return {};
    tensors.push_back(tensor);
  }
  return tensors;
}

Slice slice_of(std::size_t count, std::size_t element_size, int rank, int size) {
  const std::size_t line = kCacheLine / element_size;
  const std::size_t lines = (count + line - 1) / line;
  const auto border = [&](int r) {
    const auto ranks = static_cast<std::size_t>(size);
    const auto at = static_cast<std::size_t>(r);
    return std::min(count, line * (lines / ranks * at + std::min(at, lines % ranks)));
  };
  return {border(rank), border(rank + 1)};
}

}  // namespace paceline::node
