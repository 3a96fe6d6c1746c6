#pragma once

#include <cstdint>
#include <string>

namespace paceline::bench {

// One of kAlgorithms beside theory, for an all-reduce of K bytes on N ranks with links of B bytes a
// second in each direction.
struct Theory {
  std::string formula;
  double us;
};

// With one rank that all others send to and receive from, its link carries (N - 1) K bytes one way
// and then the other. Otherwise every link carries 2 (N - 1) K / N bytes, which is also the least
// for any algorithm.
Theory theory_of(const std::string& algorithm, int ranks, std::int64_t bytes,
                 double bytes_per_second);

}  // namespace paceline::bench
