#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <tuple>
#include <utility>

#include <paceline/checkpoint_directory.h>
#include <paceline/error.h>

#include "checkpoint/generic_dict.h"

namespace paceline {
namespace {

using checkpoint::empty_dict;
using checkpoint::GenericDict;

GenericDict value_of_logical(const LogicalRankState& state) {
  GenericDict registered = empty_dict();
  for (const auto& [name, tensor] : state.registered) registered.insert(name, tensor);
  GenericDict dict = empty_dict();
  dict.insert("random", state.random);
  dict.insert("registered", registered);
  return dict;
}

LogicalRankState logical_state_of(const at::IValue& value) {
  LogicalRankState state;
  state.random = value.toGenericDict().at("random").toTensor();
  for (const auto& one : value.toGenericDict().at("registered").toGenericDict()) {
    state.registered[one.key().toStringRef()] = one.value().toTensor();
  }
  return state;
}

}  // namespace

Stateful::Stateful(torch::nn::Module& module)
    : Stateful(
          [&module] {
            GenericDict dict = empty_dict();
            for (const auto& one : paceline::state_dict(module))
              dict.insert(one.key(), one.value());
            return dict;
          },
          [&module](const at::IValue& value) {
            paceline::load_state_dict(module, paceline::state_dict(value));
          }) {}

Stateful::Stateful(torch::optim::Optimizer& optimizer)
    : Stateful(
          [&optimizer] { return paceline::state_dict(optimizer); },
          [&optimizer](const at::IValue& value) { paceline::load_state_dict(optimizer, value); }) {}

Stateful::Stateful(LogicalRanks ranks)
    : Stateful(
          [ranks] {
            GenericDict dict = empty_dict();
            const auto [first, count] = ranks.range();
            for (int rank = first; rank < first + count; ++rank) {
              dict.insert(rank, value_of_logical(ranks.state(rank)));
            }
            return dict;
          },
          [ranks](const at::IValue& value) mutable {
            const GenericDict states = value.toGenericDict();
            const auto total = static_cast<std::size_t>(ranks.total());
            if (states.size() != total) {
              throw Error(fmt::format(
                  "it has {} logical ranks, and DdpOptions::logical_ranks is {}: resume "
                  "with as many as the run had that saved it",
                  states.size(), total));
            }
            const auto [first, count] = ranks.range();
            for (int rank = first; rank < first + count; ++rank) {
              const auto found = states.find(rank);
              if (found == states.end()) {
                throw Error(fmt::format("logical rank {} of {} is missing", rank, total));
              }
              ranks.set_state(rank, logical_state_of(found->value()));
            }
          },
          Stateful::Scope::logical_ranks) {
  // Without DdpOptions::logical_ranks this throws, before anything is trained.
  std::ignore = ranks.state(ranks.range().first);
}

void Stateful::throw_other_type(const at::IValue& value) {
  if (value.isInt()) {
    throw Error(fmt::format("it is {}, which the variable cannot have", value.toInt()));
  }
  throw Error(fmt::format("it is a {}, in place of the variable's type", value.tagKind()));
}

Stateful::Stateful(at::Tensor& tensor)
    : Stateful(
          [&tensor] { return tensor.detach(); },
          [&tensor](const at::IValue& value) {
            const at::NoGradGuard no_grad;
            if (!value.isTensor() || value.toTensor().sizes() != tensor.sizes()) {
              throw Error(fmt::format("it is {}, in place of a tensor of {} elements",
                                      value.isTensor() ? "of another shape" : value.tagKind(),
                                      tensor.numel()));
            }
            const at::ScalarType type = value.toTensor().scalar_type();
            if (!c10::canCast(type, tensor.scalar_type())) {
              throw Error(fmt::format("it has elements of {}, in place of {}", c10::toString(type),
                                      c10::toString(tensor.scalar_type())));
            }
            tensor.copy_(value.toTensor());
          }) {}

}  // namespace paceline
