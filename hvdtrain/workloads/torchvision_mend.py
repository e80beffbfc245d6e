"""Makes torchvision importable with a torch build that it was not built for.

torchvision's wheel is linked for CUDA. With a CPU build of torch its extension cannot load, and
then its import fails, since a module registers shapes for undefined operators. Defining their
signatures first is sufficient for models, datasets and transforms; the image decoders and the box
operators of the extension remain unavailable.

``hvdtrain install-horovod`` copies this file into an environment in which every Python imports it
at its start: so it imports only modules that Python has already loaded, and nothing of hvdtrain.
"""

import sys

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class Mend:
    """A finder that finds nothing, but is called before torchvision uses the operators."""

    library: object = None
    """Keeps the definitions alive."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """See ``importlib.abc.MetaPathFinder``."""
        # torchvision has already tried to load its extension, which defines the operators.
        if fullname == "torchvision._meta_registrations":
            torch = sys.modules["torch"]
            if not hasattr(torch.ops.torchvision, "nms"):
                library = self.library = torch.library.Library("torchvision", "DEF")
                for signature in SIGNATURES:
                    library.define(signature)


sys.meta_path.insert(0, Mend())
