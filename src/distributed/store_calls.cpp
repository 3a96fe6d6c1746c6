#include "distributed/store_calls.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/address.h"

namespace paceline::distributed {

std::string describe_store(c10d::Store& store) {
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store)) {
    return describe_store(*prefixed->getUnderlyingNonPrefixStore());
  }
  if (const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(&store)) {
    return "the store at tcp://" + base::join_host_port(tcp->getHost(), tcp->getPort());
  }
  if (const auto* const file = dynamic_cast<const c10d::FileStore*>(&store)) {
    return "the store at file://" + file->getPath();
  }
  return "the store";
}

}  // namespace paceline::distributed
