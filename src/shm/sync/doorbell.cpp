#include "shm/sync/doorbell.h"

#include "shm/sync/fault_point.h"

namespace paceline::shm {

// Sequentially consistent, as sleep() is: either the listener sees the new count, or we see the
// listener.
void Doorbell::ring() {
  fault_point();
  count.fetch_add(1, std::memory_order_seq_cst);
  if (listeners.load(std::memory_order_seq_cst) != 0) futex_wake_all(count);
}

void Doorbell::sleep(std::uint32_t heard) {
  listeners.fetch_add(1, std::memory_order_seq_cst);
  if (count.load(std::memory_order_seq_cst) == heard) futex_wait(count, heard, kSleepSlice);
  listeners.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace paceline::shm
