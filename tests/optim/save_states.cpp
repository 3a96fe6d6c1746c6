// Writes states for python/tests/test_optim.py: save_states FILE
//
// A dict of the states that files/schedules.pt and files/optimizers.pt have of Python.
#include <torch/torch.h>

#include <cstdio>
#include <exception>

#include <paceline/checkpoint.h>

#include "optim/optimizer_cases.h"
#include "optim/schedules.h"

using namespace paceline::optim::test;

namespace {

c10::impl::GenericDict states() {
  c10::impl::GenericDict all(c10::AnyType::get(), c10::AnyType::get());
  for (const ExpectedRates& expected : expected_rates()) {
    const auto optimizer = make_optimizer(expected.optimizer);
    const auto schedule = make_schedule(*optimizer, expected.schedule);
    for (int epoch = 0; epoch < kSavedAfter; ++epoch) schedule->step();
    c10::impl::GenericDict both(c10::AnyType::get(), c10::AnyType::get());
    both.insert("schedule", schedule->state_dict());
    both.insert("optimizer", paceline::state_dict(*optimizer));
    all.insert(expected.schedule + " " + expected.optimizer, both);
  }
  for (const ExpectedParameters& expected : expected_parameters()) {
    auto parameters = make_parameters(expected.name);
    const auto optimizer = make_optimizer(expected.name, parameters);
    train(parameters, *optimizer, 0, kSteps / 2);
    all.insert(expected.name, paceline::state_dict(*optimizer));
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    paceline::pickle_save(states(), argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
