#include "distributed/bucket_channel.h"

#include <ATen/ATen.h>

#include <paceline/error.h>

#include "distributed/backend.h"
#include "distributed/translate.h"

namespace paceline::distributed {
namespace {

// Over any c10d::Backend: an asynchronous all-reduce for each bucket. A backend matches calls by
// their order, so buckets start in ascending order, whatever order they are published in.
class WorkChannel final : public BucketChannel {
 public:
  WorkChannel(c10::intrusive_ptr<c10d::Backend> backend, const std::vector<Bucket>& buckets)
      : backend_(std::move(backend)), buckets_(buckets), published_(buckets.size()) {
    for (const Bucket& bucket : buckets_) {
      tensors_.push_back(at::zeros({bucket.count}, at::device(bucket.device).dtype(bucket.type)));
    }
  }

  const at::Tensor& tensor(std::size_t bucket) const override { return tensors_[bucket]; }
  bool in_step() const override { return in_step_; }

  void begin_step(std::uint32_t /*forwards*/) override {
    in_step_ = true;
    published_.assign(buckets_.size(), false);
    works_.clear();
  }

  void publish(std::size_t bucket) override {
    published_[bucket] = true;
    while (works_.size() < buckets_.size() && published_[works_.size()]) start(works_.size());
  }

  void try_progress() override {}

  void finish() override {
    wait_for_works();
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (buckets_[b].op == Op::average) tensors_[b].div_(backend_->getSize());
    }
    in_step_ = false;
  }

  void abandon_step() override {
    if (!in_step_) return;
    wait_for_works();
    in_step_ = false;
  }

  [[noreturn]] void fail(const std::string& text) override { throw Error(text); }

 private:
  void start(std::size_t bucket) {
    std::vector<at::Tensor> tensors{tensors_[bucket]};
    c10d::AllreduceOptions options;
    options.reduceOp = buckets_[bucket].op == Op::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    translate("all_reduce", [&] { works_.push_back(backend_->allreduce(tensors, options)); });
  }

  void wait_for_works() {
    translate("backward", [&] {
      for (const auto& work : works_) work->wait();
    });
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> tensors_;
  std::vector<bool> published_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  bool in_step_ = false;
};

}  // namespace

std::unique_ptr<BucketChannel> make_bucket_channel(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device,
    const std::vector<BucketChannel::Bucket>& buckets, BucketChannel::Describe describe) {
  auto backend = group->getBackend(device);
  if (auto* const ours = dynamic_cast<ExtendedBackend*>(backend.get())) {
    return ours->make_bucket_channel(buckets, std::move(describe));
  }
  return std::make_unique<WorkChannel>(std::move(backend), buckets);
}

}  // namespace paceline::distributed
