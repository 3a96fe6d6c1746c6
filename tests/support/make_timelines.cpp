// Writes timelines of a synthetic job, as input for `paceline report`:
//   make_timelines DIR straggler|communication|uneven|input|short|well [RANKS]
#include <filesystem>
#include <iostream>
#include <map>
#include <random>
#include <string>

#include "support/made_timelines.h"

namespace {

using paceline::test::MadeJob;

// Deterministic noise by rank and step, with mean 0 and the given deviation.
double noise(int rank, int step, double deviation) {
  std::mt19937 random(static_cast<unsigned>(1000 * step + rank));
  random.discard(3);
  return std::normal_distribution<double>(0, deviation)(random);
}

MadeJob job_of(const std::string& kind, int ranks) {
  const double scale = kind == "short" ? 0.02 : 1;
  const double spread = kind == "uneven" ? 2500 : 150;
  MadeJob job{.ranks = ranks, .steps = 200, .buckets = 12};
  job.computing = [=](int rank, int step) {
    const double slow = kind == "straggler" && rank == 2 ? 5000 : 0;
    return scale * std::max(1000.0, 12000 + slow + noise(rank, step, spread));
  };
  job.between = [=](int rank, int step) {
    const double pause = kind == "well" && step % 60 == 0 ? 2e5 : 0;
    return (kind == "input" ? 9000 : scale * 900) + std::abs(noise(rank, -step, 50)) + pause;
  };
  job.reduction = kind == "communication" ? 1100 : kind == "short" ? 20 : 300;
  return job;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "make_timelines DIR straggler|communication|uneven|input|short|well [RANKS]\n";
    return 2;
  }
  std::filesystem::create_directories(argv[1]);
  const MadeJob job = job_of(argv[2], argc > 3 ? std::max(1, std::stoi(argv[3])) : 4);
  paceline::test::write_timelines(argv[1], paceline::test::make_timelines(job));
  return 0;
}
