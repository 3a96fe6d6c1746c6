#include <paceline/collectives.h>

#include "distributed/devices/staged_backend.h"
#include "distributed/start.h"

namespace paceline {

using distributed::BackendPtr;
using distributed::start;
using distributed::Tensors;

namespace {

// Messages of CUDA tensors go through the CPU over NCCL, too: it has no tags, and lets two ranks
// that send to each other at once wait for each other.
BackendPtr carrier_of(c10d::Backend& backend, const ProcessGroup& group) {
  if (backend.getBackendName() != "nccl") {
    return BackendPtr::unsafe_reclaim_from_nonowning(&backend);
  }
  return c10::make_intrusive<distributed::StagedBackend>(
      group.c10d()->getBackend(c10::DeviceType::CPU));
}

Work start_send(const at::Tensor& tensor, int dst, const SendOptions& options) {
  return start(options.group, "send", {}, {tensor},
               [&](c10d::Backend& backend, Tensors& /*to*/, Tensors& from) {
                 const int peer = distributed::group_rank_of(options.group, dst);
                 return carrier_of(backend, options.group)->send(from, peer, options.tag);
               });
}

Work start_recv(const at::Tensor& tensor, const RecvOptions& options) {
  return start(options.group, "recv", {tensor}, {},
               [&](c10d::Backend& backend, Tensors& to, Tensors& /*from*/) {
                 const BackendPtr carrier = carrier_of(backend, options.group);
                 if (!options.src) return carrier->recvAnysource(to, options.tag);
                 const int peer = distributed::group_rank_of(options.group, *options.src);
                 return carrier->recv(to, peer, options.tag);
               });
}

}  // namespace

void send(const at::Tensor& tensor, int dst, const SendOptions& options) {
  start_send(tensor, dst, options).wait();
}
int recv(const at::Tensor& tensor, const RecvOptions& options) {
  Work work = start_recv(tensor, options);
  work.wait();
  return work.source_rank();
}

Work send_async(const at::Tensor& tensor, int dst, const SendOptions& options) {
  return start_send(tensor, dst, options);
}
Work recv_async(const at::Tensor& tensor, const RecvOptions& options) {
  return start_recv(tensor, options);
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations) {
  std::vector<Work> works;
  for (const P2POp& one : operations) {
    works.push_back(
        one.op == P2POp::Kind::isend
            ? send_async(one.tensor, one.peer, {.group = one.group, .tag = one.tag})
            : recv_async(one.tensor, {.src = one.peer, .group = one.group, .tag = one.tag}));
  }
  return works;
}

}  // namespace paceline
