#pragma once

#include <fmt/format.h>

#include <string_view>

#include <paceline/error.h>

namespace paceline::parallel {

// Runs collective calls that the library makes by itself, and adds their purpose to their errors.
template <typename Body>
void with_error_context(std::string_view purpose, Body&& body,
                        std::string_view caller = "DistributedDataParallel") {
  const auto explained = [&](const PeerError& error) {
    return fmt::format("{} ({} was {})", error.what(), caller, purpose);
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
