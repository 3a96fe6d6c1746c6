#pragma once

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "support/child_process.h"

namespace paceline::test {

// The norms that the training program has written for so many ranks; empty if it has not.
inline std::vector<double> norms_in(const std::string& output, int ranks) {
  const std::string label = "ranks=" + std::to_string(ranks) + " norms=";
  const std::size_t at = output.find(label);
  std::vector<double> norms;
  if (at == output.npos) return norms;
  std::istringstream line(
      output.substr(at + label.size(), output.find('\n', at) - at - label.size()));
  for (double norm = 0; line >> norm;) norms.push_back(norm);
  return norms;
}

// The hashes of parameters' bits in `output`, one from each rank.
inline std::vector<std::string> bits_in(const std::string& output) {
  const std::string label = "bits=";
  std::vector<std::string> bits;
  for (auto at = output.find(label); at != output.npos; at = output.find(label, at + 1)) {
    bits.push_back(output.substr(at + label.size(), 16));
  }
  return bits;
}

// `output` has the parameters that one process without Paceline comes to. Backends add in different
// orders.
inline void expect_trained(const std::string& output, int ranks, int steps = 5) {
  ChildProcess alone({TRAIN_PROGRAM, "alone", std::to_string(ranks), std::to_string(steps)});
  ASSERT_EQ(alone.wait(), 0) << alone.err();
  const auto expected = norms_in(alone.out(), ranks);
  const auto got = norms_in(output, ranks);
  ASSERT_EQ(expected.size(), 6U) << alone.out();
  ASSERT_EQ(got.size(), expected.size()) << output;
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i] / expected[i], 1, 1e-12);
}

}  // namespace paceline::test
