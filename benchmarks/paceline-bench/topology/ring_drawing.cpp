#include "topology/ring_drawing.h"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "distributed/ring_schedule.h"

namespace paceline::bench {
namespace {

// The ranks whose values a chunk sums, as digits.
std::string union_of(const std::string& a, const std::string& b) {
  std::string result;
  for (char rank = '0'; rank <= '9'; ++rank) {
    if (a.find(rank) != a.npos || b.find(rank) != b.npos) result += rank;
  }
  return result;
}

// What each rank has of each chunk.
class Ring {
 public:
  explicit Ring(int ranks) : ranks_(ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      chunks_.emplace_back(static_cast<std::size_t>(ranks), std::to_string(rank));
    }
  }

  const std::string& at(int rank, int chunk) const {
    return chunks_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(chunk)];
  }
  void take(int step) {
    const auto before = chunks_;
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto chunk =
          static_cast<std::size_t>(distributed::chunk_received_in_ring(rank, step, ranks_));
      const auto& from = before[static_cast<std::size_t>((rank + ranks_ - 1) % ranks_)][chunk];
      auto& to = chunks_[static_cast<std::size_t>(rank)][chunk];
      to = distributed::adds_in_ring(step, ranks_) ? union_of(from, to) : from;
    }
  }

 private:
  int ranks_;
  std::vector<std::vector<std::string>> chunks_;
};

std::string phase(int step, int ranks) {
  return distributed::adds_in_ring(step, ranks) ? "reduce-scatter" : "all-gather";
}

std::string line_of_step(const Ring& ring, int rank, int ranks, int step) {
  std::string line =
      fmt::format("  rank {} sends chunk {} to {} |", rank,
                  distributed::chunk_sent_in_ring(rank, step, ranks), (rank + 1) % ranks);
  for (int chunk = 0; chunk < ranks; ++chunk) {
    const bool is_new = chunk == distributed::chunk_received_in_ring(rank, step, ranks);
    line += fmt::format("  {}{:<{}}", is_new ? '>' : ' ', ring.at(rank, chunk), ranks);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + '\n';
}

// A chunk begins at the rank of its number, and has come from there to `rank`.
std::string sum_in_chart(int rank, int chunk, int step, int ranks) {
  if (!distributed::adds_in_ring(step, ranks)) return "all";
  return step == 0 ? std::to_string(rank) : fmt::format("{}-{}", chunk, rank);
}

}  // namespace

std::string ring_in_words(int ranks) {
  const int steps = distributed::ring_steps(ranks);
  std::string text = fmt::format(
      "A ring all-reduce of {0} ranks cuts the tensor into {0} chunks and takes {1} steps. Below,\n"
      "a chunk is written as the ranks whose values it sums; > marks what the step has brought.\n",
      ranks, steps);
  Ring ring(ranks);
  for (int step = 0; step < steps; ++step) {
    ring.take(step);
    text += fmt::format("\nstep {} of {}, {}\n", step + 1, steps, phase(step, ranks));
    for (int rank = 0; rank < ranks; ++rank) text += line_of_step(ring, rank, ranks, step);
  }
  return text;
}

drawing::SpanChart ring_chart(int ranks) {
  drawing::SpanChart chart{
      fmt::format("The messages of a ring all-reduce of {} ranks", ranks),
      "steps",
      {},
      {},
      "Each box is a message to the next rank. Its colour is the chunk. Its text says whose values "
      "the chunk sums: a-b stands for the ranks from a to b along the ring."};
  for (int rank = 0; rank < ranks; ++rank) {
    chart.legend.push_back(fmt::format("chunk {}", rank));
    auto& spans = chart.rows.emplace_back(drawing::SpanRow{fmt::format("rank {}", rank), {}}).spans;
    for (int step = 0; step < distributed::ring_steps(ranks); ++step) {
      const int chunk = distributed::chunk_sent_in_ring(rank, step, ranks);
      spans.push_back({sum_in_chart(rank, chunk, step, ranks), static_cast<double>(step),
                       step + 1.0, static_cast<std::size_t>(chunk)});
    }
  }
  return chart;
}

}  // namespace paceline::bench
