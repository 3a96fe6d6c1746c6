#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/distributed.h>

namespace paceline {

struct DdpOptions {
  // Whether rank 0's buffers, those that the module has at construction (BatchNorm's running
  // statistics, say) are copied to all ranks before a forward in training mode with grad mode on,
  // if the step before it was synchronised.
  bool broadcast_buffers = true;
  // Who averages gradients; by default the world.
  ProcessGroup process_group{};
  // Gradients are reduced in buckets of this many MiB. The first one to be ready is at most 1 MiB,
  // so that communication starts early. A gradient alone may be larger.
  double bucket_cap_mb = 25;
  // Allows parameters that take no part in a step, for one more small reduction a step. A parameter
  // that took part on some rank gets the average, others counting as zero; one that took part
  // nowhere keeps its gradient as it was. Without it, such a parameter is an error that names it.
  bool find_unused_parameters = false;
};

namespace detail {
class DdpCore;

// The part that knows no module type.
class DdpHandle {
 public:
  DdpHandle(torch::nn::Module* module, const DdpOptions& options);
  DdpHandle(DdpHandle&&) noexcept;
  DdpHandle& operator=(DdpHandle&&) noexcept;
  ~DdpHandle();

  void before_forward();
  std::shared_ptr<bool> sync_switch() const;

 private:
  std::unique_ptr<DdpCore> core_;
};
}  // namespace detail

// While it lives, forwards of its DistributedDataParallel start steps that are not synchronised:
// gradients accumulate on each rank alone. Move-only.
class [[nodiscard]] NoSyncGuard {
 public:
  explicit NoSyncGuard(std::shared_ptr<bool> sync, bool enabled)
      : sync_(enabled ? std::move(sync) : nullptr), before_(sync_ && *sync_) {
    if (sync_) *sync_ = false;
  }
  NoSyncGuard(NoSyncGuard&& other) noexcept = default;
  NoSyncGuard& operator=(NoSyncGuard&&) = delete;
  ~NoSyncGuard() {
    if (sync_) *sync_ = before_;
  }

 private:
  std::shared_ptr<bool> sync_;
  bool before_;
};

// Wraps a module so that every backward leaves the average of all ranks' gradients in its
// parameters, reduced bucket by bucket while the backward still runs (Li et al., "PyTorch
// Distributed", VLDB 2020). Construction is collective: parameters and buffers become rank 0's, and
// ranks whose parameters or buffers differ in number, name, shape, strides or type throw Mismatch
// that names the first.
//
// The forward decides, the backward obeys: whether a backward is synchronised was fixed by the last
// forward before it. After a synchronised backward, .grad of each parameter is a view into its
// bucket, which the next one changes in place (it adds, as always): clone what is to be kept. A
// backward throws PeerLost, Timeout or Mismatch when another rank fails, and Error for parameters
// that got no gradient (see find_unused_parameters). After a backward that threw, docs/errors.md
// says when the next forward can go on; gradients that lie in buckets are zero then.
//
// In a world of one, and without a world, it does nothing but call the module. A checkpoint is that
// of module(): save it on rank 0, and load it before wrapping, on rank 0 at least; the optimizer's
// is loaded on every rank. Buffers follow rank 0 before training forwards only, so before an
// evaluation that all ranks share, broadcast them.
//
// Move-only, and no Module itself. Used by one thread at a time; the module must not gain or lose
// parameters meanwhile. At most one wrapper around a module at a time.
template <std::derived_from<torch::nn::Module> M>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(std::shared_ptr<M> module, const DdpOptions& options = {})
      : module_(std::move(module)), handle_(module_.get(), options) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<M>& module,
                                   const DdpOptions& options = {})
      : DistributedDataParallel(module.ptr(), options) {}

  // The module's own forward, whatever its signature.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    handle_.before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }

  // auto guard = model.no_sync(micro + 1 < accumulation);
  NoSyncGuard no_sync(bool enabled = true) { return NoSyncGuard(handle_.sync_switch(), enabled); }

  const std::shared_ptr<M>& module() const { return module_; }
  std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

 private:
  std::shared_ptr<M> module_;
  detail::DdpHandle handle_;
};

template <typename Holder>
requires std::derived_from<typename Holder::ContainedType, torch::nn::Module>
DistributedDataParallel(Holder, DdpOptions = {})
->DistributedDataParallel<typename Holder::ContainedType>;
template <typename M>
DistributedDataParallel(std::shared_ptr<M>, DdpOptions = {}) -> DistributedDataParallel<M>;

}  // namespace paceline
