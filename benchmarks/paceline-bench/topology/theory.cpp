#include "topology/theory.h"

namespace paceline::bench {

Theory theory_of(const std::string& algorithm, int ranks, std::int64_t bytes,
                 double bytes_per_second) {
  const double through_one = 2e6 * (ranks - 1) * static_cast<double>(bytes) / bytes_per_second;
  if (algorithm == "naive" || algorithm == "parameter_server")
    return {"2 (N-1) K / B", through_one};
  return {"2 (N-1) K / (N B)", through_one / ranks};
}

}  // namespace paceline::bench
