#include "parallel/ddp/model_loads.h"

#include <atomic>

namespace paceline::ddp {
namespace {

std::atomic<std::uint32_t> load_count;

}  // namespace

std::uint32_t model_loads() {
  return load_count;
}

void count_model_load() {
  ++load_count;
}

}  // namespace paceline::ddp
