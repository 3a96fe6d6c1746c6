#include <paceline/logical_data_loader.h>

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <paceline/error.h>

namespace paceline::data::detail {

LogicalPositions::LogicalPositions(LogicalRanks& ranks, std::string name, std::int64_t batch_size)
    : ranks_(ranks), name_(std::move(name)), positions_(std::make_shared<Positions>()) {
  ranks.register_state(
      name_,
      [positions = positions_, batch_size](int rank) {
        const auto found = positions->of_rank.find(rank);
        const auto of = found == positions->of_rank.end() ? LoaderPosition{} : found->second;
        return at::tensor({of.epoch, of.steps, batch_size}, at::kLong);
      },
      [positions = positions_, name = name_, batch_size](int rank, const at::Tensor& value) {
        if (value.numel() != 3 || value.scalar_type() != at::kLong) {
          throw UsageError(fmt::format(
              "the state of logical rank {} has no position of a LogicalDataLoader as {}: it is a "
              "tensor of three Long numbers, the epoch, the steps taken in it and the batch size",
              rank, name));
        }
        const auto* const numbers = value.contiguous().const_data_ptr<std::int64_t>();
        if (numbers[2] != batch_size) {
          throw UsageError(fmt::format(
              "the state of logical rank {} says how many batches of {} were taken, and {} has "
              "batches of {}: use the batch size of the run that the state is from",
              rank, numbers[2], name, batch_size));
        }
        const LoaderPosition position{numbers[0], numbers[1]};
        // A logical rank that another rank has run until now is where this process is.
        const bool is_new = positions->of_rank.insert_or_assign(rank, position).second;
        if (is_new && position == positions->taken) return;
        positions->were_set = true;
        positions->chosen_epoch.reset();
      });
}

LogicalPositions::~LogicalPositions() {
  ranks_.unregister_state(name_);
}

LoaderPosition LogicalPositions::begin(const LogicalRange& range) {
  LoaderPosition position{epoch(range), 0};
  const LoaderPosition first = positions_->of_rank[range.first];
  if (std::exchange(positions_->were_set, false) && first.epoch == position.epoch) {
    position = first;
  }
  for (int rank = range.first; rank < range.first + range.count; ++rank) {
    const LoaderPosition& other = positions_->of_rank[rank];
    if (position == first && !(other == first)) {
      throw UsageError(
          fmt::format("the states of logical ranks {} and {} are of different steps: the one has "
                      "taken {} steps "
                      "in epoch {}, and the other {} in epoch {}",
                      range.first, rank, first.steps, first.epoch, other.steps, other.epoch));
    }
  }
  set(position, range);
  return position;
}

std::int64_t LogicalPositions::epoch(const LogicalRange& range) const {
  if (positions_->chosen_epoch) return *positions_->chosen_epoch;
  const auto found = positions_->of_rank.find(range.first);
  return found == positions_->of_rank.end() ? positions_->taken.epoch : found->second.epoch;
}

void LogicalPositions::choose_epoch(std::int64_t epoch) {
  positions_->chosen_epoch = epoch;
}

void LogicalPositions::set(const LoaderPosition& position, const LogicalRange& range) {
  positions_->taken = position;
  positions_->were_set = false;
  positions_->of_rank.clear();
  for (int rank = range.first; rank < range.first + range.count; ++rank) {
    positions_->of_rank[rank] = position;
  }
}

void check_position(const LoaderPosition& position, std::int64_t steps) {
  if (position.steps >= 0 && position.steps <= steps) return;
  throw UsageError(
      fmt::format("the states of logical ranks say that {} steps of epoch {} were taken, which has "
                  "{}: use the batch size, the samplers and the data set of the run that they are "
                  "from",
                  position.steps, position.epoch, steps));
}

void throw_no_batch(int rank, const LogicalRange& range) {
  throw UsageError(
      fmt::format("no batch for logical rank {}: when the step began, this rank ran {} logical "
                  "ranks from {} on",
                  rank, range.count, range.first));
}

void check_same_size(std::int64_t first, std::int64_t other, int rank) {
  if (first == other) return;
  throw UsageError(
      fmt::format("logical rank {} has {} batches in an epoch, and another one of this rank {}: "
                  "all need equally "
                  "many (DistributedSampler with pad or drop_last)",
                  rank, other, first));
}

}  // namespace paceline::data::detail
