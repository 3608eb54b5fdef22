// The logits of a model that AOTInductor packaged with ops of moe_ops in it, for the last of some tokens:
//
//   aoti_main model.pt2 build/libmoe_ops.so 1 2 3
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int count, char** words) {
  const bool given = count > 2 && std::string(words[2]).find(".so") != std::string::npos;
  if (count < (given ? 4 : 3)) {
    std::cerr << "usage: aoti_main MODEL.pt2 [libmoe_ops.so] TOKEN...\n";
    return 2;
  }
  if (given && !dlopen(words[2], RTLD_NOW)) {  // which defines the ops, and stays loaded
    std::cerr << dlerror() << "\n";
    return 1;
  }
  try {
    std::vector<int64_t> tokens;
    for (int i = given ? 3 : 2; i < count; ++i) tokens.push_back(std::stoll(words[i]));
    const c10::InferenceMode inference;
    torch::inductor::AOTIModelPackageLoader model(words[1]);
    const at::Tensor logits = model.run({at::tensor(tokens).unsqueeze(0)})[0].select(1, -1);
    std::cout.precision(9);
    for (int64_t i = 0; i < logits.numel(); ++i) std::cout << logits.flatten()[i].item<float>() << "\n";
  } catch (const std::exception& error) {
    const auto* const torchs = dynamic_cast<const c10::Error*>(&error);
    const std::string said = torchs ? torchs->what_without_backtrace() : error.what();
    std::cerr << said << "\n";
    if (said.find("moe_ops::") != std::string::npos && !given)
      std::cerr << "give libmoe_ops.so after the model; python -m moe_ops build-library DIR makes it\n";
    return 1;
  }
}
