#include "parallel/ddp/wrapped_model.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <sstream>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/printable.h"
#include "distributed/intraop_threads.h"
#include "distributed/process_state.h"
#include "parallel/sync_batch_norm/normalize.h"
#include "parallel/with_error_context.h"

namespace paceline::ddp {
namespace {

std::string join(at::IntArrayRef numbers) {
  return fmt::format("[{}]", fmt::join(numbers.begin(), numbers.end(), ", "));
}

std::string describe(const std::string& full_name, const at::Tensor& tensor, const char* kind) {
  const std::string name = base::printable_line(full_name);
  if (!tensor.defined()) return fmt::format("{}, an undefined {}", name, kind);
  std::string text = fmt::format("{}, a {} of shape {} and type {}", name, kind,
                                 join(tensor.sizes()), c10::toString(tensor.scalar_type()));
  // Gradients have the parameters' layout in the bucket.
  if (tensor.layout() == at::kStrided && !tensor.is_contiguous()) {
    text += " with strides " + join(tensor.strides());
  }
  return text;
}

std::string describe_logical_ranks(int count) {
  std::string text = fmt::format("logical_ranks = {}", count);
  if (count > 0) {
    // Results would depend on which rank runs a logical rank.
    text +=
        " with " + distributed::describe_computing(at::get_num_threads(), at::get_cpu_capability());
  }
  return text;
}

std::string describe(Average average) {
  constexpr std::array kNames{"ranks", "samples", "sum"};
  return fmt::format("average = Average::{}", kNames.at(static_cast<std::size_t>(average)));
}

// Options that ranks must give alike, a line each.
std::vector<std::string> describe(const DdpOptions& options) {
  const auto line = [](const char* name, const auto& value) {
    return base::printable_line(fmt::format("{} = {}", name, value));
  };
  const auto list = [&](const char* name, const auto& values) {
    return line(name, fmt::format("{{{}}}", fmt::join(values, ", ")));
  };
  const std::set<std::string> triggers(options.all_reduce_trigger_params.begin(),
                                       options.all_reduce_trigger_params.end());
  return {describe_logical_ranks(options.logical_ranks),
          describe(options.average),
          line("broadcast_buffers", options.broadcast_buffers),
          line("bucket_cap_mb",
               options.bucket_cap_mb ? fmt::to_string(*options.bucket_cap_mb) : "unset"),
          list("bucket_cap_mb_list", options.bucket_cap_mb_list),
          line("find_unused_parameters", options.find_unused_parameters),
          line("static_graph", options.static_graph),
          line("skip_all_reduce_unused_params", options.skip_all_reduce_unused_params),
          list("all_reduce_trigger_params", triggers),
          list("delay_all_reduce_named_params", options.delay_all_reduce_named_params),
          line("param_to_hook_all_reduce", options.param_to_hook_all_reduce),
          line("zero_copy", options.zero_copy),
          line("check_sync_every", options.check_sync_every)};
}

// The weights of embeddings with sparse gradients.
std::set<const void*> sparse_weights(const torch::nn::Module& module) {
  std::set<const void*> weights;
  for (const auto& part : const_cast<torch::nn::Module&>(module).modules()) {
    const auto add = [&](const auto* embedding) {
      if (embedding != nullptr && embedding->options.sparse()) {
        weights.insert(embedding->weight.unsafeGetTensorImpl());
      }
    };
    add(dynamic_cast<const torch::nn::EmbeddingImpl*>(part.get()));
    add(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(part.get()));
  }
  return weights;
}

std::vector<NamedTensor> named(const torch::OrderedDict<std::string, at::Tensor>& items) {
  std::vector<NamedTensor> result;
  for (const auto& item : items) result.push_back({item.key(), item.value()});
  return result;
}

std::vector<NamedTensor> named(const auto& items_of_a_script) {
  std::vector<NamedTensor> result;
  for (const auto& item : items_of_a_script) result.push_back({item.name, item.value});
  return result;
}

std::vector<NamedTensor> named(const NamedTensors& tensors) {
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor] : tensors) result.push_back({name, tensor});
  return result;
}

void check_names(std::set<std::string>& names, const std::vector<NamedTensor>& added,
                 const char* kind) {
  for (const auto& [name, tensor, sparse] : added) {
    if (!tensor.defined()) {
      throw UsageError(fmt::format("{} {} is undefined: name tensors that exist", kind, name));
    }
    if (!names.insert(name).second) {
      throw UsageError(
          fmt::format("two of the parameters and buffers are called {}: give each a name of its "
                      "own",
                      name));
    }
  }
}

}  // namespace

std::vector<std::string> describe(const WrappedModel& model) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor, sparse] : model.parameters()) {
    lines.push_back(
        describe(name, tensor, tensor.requires_grad() ? "parameter" : "frozen parameter"));
  }
  for (const auto& [name, tensor, sparse] : model.buffers()) {
    lines.push_back(describe(name, tensor, "buffer"));
  }
  return lines;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string first_difference(std::span<const std::string> first, std::span<const std::string> other,
                             std::pair<int, int> ranks) {
  const auto [a, b] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
  const auto what = [](const auto& at, const auto& lines) {
    return at == lines.end() ? std::string("nothing more") : *at;
  };
  return fmt::format(
      "the models differ: {} parameters and buffers on rank {}, {} on rank {}; the first "
      "difference is {} on rank {} and {} on rank {}",
      first.size(), ranks.first, other.size(), ranks.second, what(a, first), ranks.first,
      what(b, other), ranks.second);
}

std::string option_difference(const std::string& first, const std::string& other,
                              std::pair<int, int> ranks) {
  return fmt::format("{} on rank {} and {} on rank {}: it must be the same on all ranks", first,
                     ranks.first, other, ranks.second);
}

WrappedModel::WrappedModel(const NamedTensors& parameters, const NamedTensors& buffers)
    : WrappedModel(named(parameters), named(buffers)) {}

WrappedModel::WrappedModel(const std::vector<NamedTensor>& parameters,
                           const std::vector<NamedTensor>& buffers)
    : parameters_(parameters), buffers_(buffers) {
  std::set<std::string> names;
  check_names(names, parameters, "parameter");
  check_names(names, buffers, "buffer");
}

std::vector<NamedTensor> WrappedModel::parameters() const {
  if (script_) return named(script_->named_parameters());
  return module_ == nullptr ? parameters_ : named(module_->named_parameters());
}

std::vector<NamedTensor> WrappedModel::buffers() const {
  if (script_) return named(script_->named_buffers());
  return module_ == nullptr ? buffers_ : named(module_->named_buffers());
}

bool WrappedModel::is_training() const {
  if (script_) return script_->is_training();
  return module_ == nullptr || module_->is_training();
}

std::vector<NamedTensor> WrappedModel::trainable_parameters() const {
  const auto sparse = module_ == nullptr ? std::set<const void*>{} : sparse_weights(*module_);
  std::vector<NamedTensor> result;
  std::set<const void*> seen;
  for (const auto& [name, tensor, is_sparse] : parameters()) {
    const void* const key = tensor.unsafeGetTensorImpl();
    if (!tensor.is_leaf()) {
      throw UsageError(
          fmt::format("parameter {} was computed from a tensor that requires a gradient, so it "
                      "gets none of its own: {} the result of detach() instead",
                      name, module_ == nullptr && !script_ ? "name" : "register"));
    }
    if (tensor.requires_grad() && seen.insert(key).second) {
      result.push_back({name, tensor, is_sparse || sparse.count(key) > 0});
    }
  }
  return result;
}

std::vector<NamedTensor> WrappedModel::frozen_parameters() const {
  auto all = parameters();
  std::erase_if(all, [](const NamedTensor& one) {
    return !one.tensor.defined() || one.tensor.requires_grad();
  });
  return all;
}

bool WrappedModel::has_sync_batch_norm() const {
  return module_ != nullptr && sync_batch_norm::is_in(*module_);
}

Recording check_same_model(const WrappedModel& model, const DdpOptions& options,
                           const Recording& recording) {
  const ProcessGroup& group = options.process_group;
  const std::vector<std::string> option_lines = describe(options);
  const std::size_t count = option_lines.size();
  const std::string own = fmt::format(
      "{} {} {} {}\n{}\n{}", recording.measures ? 1 : 0, recording.number, recording.rank,
      recording.process, fmt::join(option_lines, "\n"), fmt::join(describe(model), "\n"));
  auto texts = parallel::with_error_context(
      "comparing the ranks' models; construct it on all ranks of its group",
      [&] { return all_gather_bytes(own, {.group = group}); });
  Recording agreed = recording;
  for (std::string& text : texts) {
    const std::size_t end = text.find('\n');
    Recording theirs;
    std::istringstream(text.substr(0, end)) >> theirs.measures >> theirs.number >> theirs.rank >>
        theirs.process;
    agreed.measures |= theirs.measures;
    agreed.number = std::max(agreed.number, theirs.number);
    if (agreed.ranks.empty() || theirs.rank < std::ranges::min(agreed.ranks)) {
      agreed.first_rank = theirs.process;
    }
    agreed.ranks.push_back(theirs.rank);
    text.erase(0, end + 1);
  }
  std::ranges::sort(agreed.ranks);
  if (agreed.ranks.front() < 0) agreed.ranks.clear();
  const auto global = [&](std::size_t rank) {
    return distributed::global_rank_of(group, static_cast<int>(rank));
  };
  const auto first = split_lines(texts[0]);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const auto other = split_lines(texts[rank]);
    const std::pair ranks{global(0), global(rank)};
    std::size_t option = 0;
    while (option < count && first[option] == other[option]) ++option;
    const std::string text = option == count
                                 ? first_difference(std::span(first).subspan(count),
                                                    std::span(other).subspan(count), ranks)
                                 : option_difference(first[option], other[option], ranks);
    throw Mismatch(text, {ranks.second}, "DistributedDataParallel", 0);
  }
  return agreed;
}

}  // namespace paceline::ddp
