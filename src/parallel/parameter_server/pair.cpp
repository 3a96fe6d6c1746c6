#include "parallel/parameter_server/pair.h"

#include <ATen/ATen.h>

#include <utility>

#include <paceline/error.h>

#include "distributed/make_group.h"
#include "distributed/translate.h"

namespace paceline::parameter_server {
namespace {

// What is wrong with a group of two is the other rank.
template <typename Body>
auto name_peer(int rank, const char* operation, Body&& body) {
  try {
    return body();
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception&) {
    throw PeerLost(
        fmt::format("rank {}: {}: {}", rank, operation, distributed::current_exception_text()),
        {rank}, operation, 0);
  }
}

}  // namespace

Pair::Pair(distributed::BackendRequest request)
    : other_(1 - request.rank),
      other_rank_(request.members.at(static_cast<std::size_t>(other_))),
      group_(distributed::make_group("paceline", std::move(request))),
      backend_(&dynamic_cast<distributed::ExtendedBackend&>(*group_->getDefaultBackend())) {}

at::Tensor Pair::allocate(std::size_t bytes) {
  return name_peer(other_rank_, "allocate", [&] {
    return backend_->allocateTensor(static_cast<long>(bytes), at::TensorOptions(at::kByte));
  });
}

Pair::Work Pair::start_send(const at::Tensor& tensor) {
  return name_peer(other_rank_, "send", [&] {
    std::vector<at::Tensor> tensors{tensor};
    return backend_->send(tensors, other_, 0);
  });
}

void Pair::finish(const Work& work) {
  name_peer(other_rank_, "send", [&] { work->wait(); });
}

void Pair::receive(const at::Tensor& tensor) {
  name_peer(other_rank_, "recv", [&] {
    std::vector<at::Tensor> tensors{tensor};
    backend_->recv(tensors, other_, 0)->wait();
  });
}

void Pair::send_number(std::int64_t number) {
  send(at::full({1}, number, at::kLong));
}

std::int64_t Pair::receive_number() {
  const auto number = at::empty({1}, at::kLong);
  receive(number);
  return number.item<std::int64_t>();
}

void Pair::send_text(std::string_view text) {
  const auto size = static_cast<std::int64_t>(text.size());
  send_number(size);
  const auto bytes = at::empty({size}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<std::uint8_t>());
  send(bytes);
}

std::string Pair::receive_text() {
  const auto bytes = at::empty({receive_number()}, at::kByte);
  receive(bytes);
  const auto* const data = bytes.data_ptr<std::uint8_t>();
  return {data, data + bytes.numel()};
}

}  // namespace paceline::parameter_server
