#include <paceline/torch_data.h>

#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include <paceline/error.h>

namespace paceline::data {

struct TorchSampler::State {
  std::shared_ptr<data::Sampler> sampler;
  detail::EpochPosition begin;  // of the iteration that began last, or of the next one
  bool is_next = true;          // `begin` is of the next one
  std::vector<std::int64_t> indices;
  std::size_t dealt = 0;     // of them
  std::size_t requests = 0;  // of the loader, also those that got nothing
};

TorchSampler::TorchSampler(std::shared_ptr<data::Sampler> sampler)
    : state_(std::make_shared<State>()) {
  if (sampler == nullptr) throw UsageError("TorchSampler: the sampler is null");
  state_->sampler = std::move(sampler);
}

std::int64_t TorchSampler::epoch() const {
  return state_->begin.epoch;
}

void TorchSampler::set_epoch(std::int64_t epoch) {
  if (state_->is_next && state_->begin.epoch == epoch) return;  // a state is of this epoch
  go_to({.epoch = epoch});
}

void TorchSampler::go_to(const detail::EpochPosition& position) {
  state_->begin = position;
  state_->is_next = true;
}

void TorchSampler::load_state_dict(const at::IValue& state) {
  go_to(detail::position_of(state));
}

void TorchSampler::reset(std::optional<std::size_t> new_size) {
  State& state = *state_;
  if (new_size && static_cast<std::int64_t>(*new_size) != state.sampler->size()) {
    throw UsageError(fmt::format("TorchSampler: it has {} samples in an epoch, and cannot have {}",
                                 state.sampler->size(), *new_size));
  }
  if (!state.is_next) state.begin = {.epoch = state.begin.epoch + 1};
  state.is_next = false;
  state.sampler->set_epoch(state.begin.epoch);
  state.indices = state.sampler->indices_from(state.begin.samples);
  state.dealt = state.requests = 0;
}

std::optional<std::vector<std::size_t>> TorchSampler::next(std::size_t batch_size) {
  State& state = *state_;
  ++state.requests;
  const auto begin = state.indices.begin() + static_cast<std::ptrdiff_t>(state.dealt);
  const std::size_t count = std::min(batch_size, state.indices.size() - state.dealt);
  if (count == 0) return std::nullopt;
  state.dealt += count;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

at::IValue TorchSampler::state_of(const LoaderFacts& loader) const {
  const State& state = *state_;
  if (state.is_next) return detail::value_of(state.begin);
  if (loader.workers > 0 && !loader.in_order) {
    throw UsageError(
        "TorchSampler: with enforce_ordering(false), the loader's batches are not those that come "
        "first in the epoch, so it cannot be resumed");
  }
  const std::size_t full = state.indices.size() / loader.batch_size;
  const bool has_part = state.indices.size() % loader.batch_size != 0 && !loader.drop_last;
  const std::size_t batches = full + (has_part ? 1 : 0);
  // The loader asks for `jobs` batches in advance, until it gets none, and then for one more with
  // each that it hands out.
  const std::size_t ahead = loader.workers > 0 ? std::min(loader.jobs, batches + 1) : 0;
  const std::size_t delivered = std::min(state.requests - std::min(ahead, state.requests), batches);
  const auto samples = static_cast<std::int64_t>(delivered * loader.batch_size);
  return detail::value_of(
      {.epoch = state.begin.epoch,
       .samples = state.begin.samples + samples * state.sampler->num_replicas()});
}

void TorchSampler::save(torch::serialize::OutputArchive& archive) const {
  const State& state = *state_;
  const auto dealt = static_cast<std::int64_t>(state.dealt) * state.sampler->num_replicas();
  archive.write("epoch", at::IValue(state.begin.epoch));
  archive.write("samples", at::IValue(state.begin.samples + (state.is_next ? 0 : dealt)));
}

void TorchSampler::load(torch::serialize::InputArchive& archive) {
  at::IValue epoch;
  at::IValue samples;
  archive.read("epoch", epoch);
  archive.read("samples", samples);
  if (!epoch.isInt() || !samples.isInt()) {
    throw UsageError("TorchSampler: the archive has no position of a sampler");
  }
  go_to(detail::position_of(detail::value_of({epoch.toInt(), samples.toInt()})));
}

TorchSampler distributed(std::size_t dataset_size, DistributedSamplerOptions options) {
  return TorchSampler(
      DistributedSampler(static_cast<std::int64_t>(dataset_size), std::move(options)));
}

}  // namespace paceline::data
