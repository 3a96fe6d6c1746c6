#pragma once

namespace paceline::distributed {

// A ring all-reduce has 2 (size - 1) steps, counted from 0. In the first half a rank adds its own
// values to the chunk that it receives, and passes the sum on in the next step. After that, rank r
// has the whole sum of chunk r + 1, and in the second half chunks are passed on as they are.
constexpr int ring_steps(int size) {
  return 2 * (size - 1);
}
constexpr bool adds_in_ring(int step, int size) {
  return step < size - 1;
}
// The chunk that a rank sends to the next one.
constexpr int chunk_sent_in_ring(int rank, int step, int size) {
  return (rank - step + 2 * size) % size;
}
// The chunk that it receives from the one before.
constexpr int chunk_received_in_ring(int rank, int step, int size) {
  return chunk_sent_in_ring(rank - 1, step, size);
}

}  // namespace paceline::distributed
