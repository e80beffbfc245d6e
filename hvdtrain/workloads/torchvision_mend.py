"""torchvision beside a torch that it was not built for.

torchvision's wheel is linked for CUDA. Beside a CPU build of torch its extension cannot load, and
then its import fails, since a module registers shapes for operators that nobody has defined.
Defining their signatures first is enough for models, datasets and transforms; the image decoders
and the box operators of the extension stay away.

Copied into an environment by ``hvdtrain install-horovod``, where every Python imports it as it
starts: so it imports nothing but what Python has loaded already, and nothing of hvdtrain.
"""

import sys

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class Mend:
    """A finder that finds nothing: it sees torchvision about to use what was not loaded."""

    library: object = None
    """Keeps the definitions alive."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """See ``importlib.abc.MetaPathFinder``."""
        # torchvision has tried its extension by now; with it the operators are there.
        if fullname == "torchvision._meta_registrations":
            torch = sys.modules["torch"]
            if not hasattr(torch.ops.torchvision, "nms"):
                library = self.library = torch.library.Library("torchvision", "DEF")
                for signature in SIGNATURES:
                    library.define(signature)


sys.meta_path.insert(0, Mend())
