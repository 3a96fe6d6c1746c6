#include "distributed/store_exchange.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include "distributed/translate.h"
#include "node/failure.h"

namespace paceline::distributed {

std::vector<std::string> StoreExchange::all_gather(const std::string& blob,
                                                   const base::Deadline& deadline) {
  const auto key = [](int rank) { return fmt::format("rank{}", rank); };
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key(rank));
  translate("announcing this rank in the store", [&] { store_->set(key(rank_), blob); });
  try {
    store_->wait(keys, std::max(deadline.remaining(), std::chrono::milliseconds(1)));
  } catch (const std::exception& error) {
    std::vector<int> missing;
    translate("asking the store who has come", [&] {
      for (int rank = 0; rank < size_; ++rank) {
        if (!store_->check({key(rank)})) missing.push_back(rank);
      }
    });
    if (missing.empty()) throw Error(std::string("waiting for the other ranks: ") + error.what());
    throw Timeout(
        fmt::format("{} did not come to the rendezvous within {} s; this is rank {} of {}",
                    node::describe_ranks(missing), deadline.budget().count() / 1000.0, rank_,
                    size_),
        missing, "connect", 0);
  }
  std::vector<std::string> blobs;
  translate("reading the other ranks' addresses from the store", [&] {
    for (const auto& one : keys) blobs.push_back(store_->get_to_str(one));
  });
  return blobs;
}

}  // namespace paceline::distributed
