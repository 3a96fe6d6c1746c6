#pragma once

#include <fmt/format.h>

#include <string_view>

#include <paceline/error.h>

namespace paceline::parallel {

// Runs collective calls that DDP makes by itself, and adds their purpose to their errors.
template <typename Body>
void with_error_context(std::string_view purpose, Body&& body) {
  const auto explained = [&](const PeerError& error) {
    return fmt::format("{} (DistributedDataParallel was {})", error.what(), purpose);
  };
  try {
    body();
  } catch (const PeerLost& error) {
    throw PeerLost(explained(error), error.ranks(), error.operation(), error.sequence());
  } catch (const Timeout& error) {
    throw Timeout(explained(error), error.ranks(), error.operation(), error.sequence());
  } catch (const Mismatch& error) {
    throw Mismatch(explained(error), error.ranks(), error.operation(), error.sequence());
  }
}

}  // namespace paceline::parallel
