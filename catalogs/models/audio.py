"""What stands before the encoder of a speech model: convolutions that make vectors of a spectrogram.

Sound is cut into windows of fixed length, a shorter one padded; a window is a spectrogram of mel bins × frames, over
which two convolutions go, the second in steps of two frames. Every window is thus as many vectors as the encoder has
positions (Whisper: 30 s, 1,500).

Source: Radford et al., arXiv:2212.04356, §2.2; ``whisper/modeling_whisper.py`` and ``feature_extraction_whisper.py`` of
Hugging Face transformers 5.16.1.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNEL = 3  # frames that both convolutions see
STRIDE = 2  # frames from one vector to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEntry:
    """The convolutions before an encoder.

    Args:
        num_mel_bins: m, values of a frame.
        window_s: sound of one window, s.
    """

    num_mel_bins: int
    window_s: float

    def parameters(self, hidden_size: int) -> int:
        """Both convolutions with their biases: 3·h·(m + h) + 2h."""
        return KERNEL * hidden_size * (self.num_mel_bins + hidden_size) + 2 * hidden_size
