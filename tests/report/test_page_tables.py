"""Tables of a page as LaTeX."""

from __future__ import annotations

from panorgan.report.page_tables import latex_of

PAGE = """
<section id="scores"><div class="table" aria-label="50 % &amp; more">
<table><thead><tr><th rowspan="2">Organ</th><th colspan="2">Both_sites</th></tr>
<tr><th>mean<span class="sub">± SD</span></th><th>n</th></tr></thead>
<tbody><tr><th><span class="swatch"></span>Liver</th><td class="tinted best">0.9&nbsp;± 0.1
 ▲<span class="own-mark">●</span></td>
<td>3<span class="hidden"> labelled</span><span class="own-mark no-mark">●</span></td></tr>
<tr><th colspan="3">a\\b</th></tr></tbody>
<tfoot><tr><th>All</th><td>−0.5</td><td>–</td></tr></tfoot></table></div></section>
<div class="table" aria-label="pictures"><table class="looks"><tr><td>x</td></tr></table></div>
<table><tr><td>no box, no caption</td></tr></table>
"""

LATEX = r"""% scores
% \usepackage{booktabs,amssymb}
\begin{table}
  \centering
  \caption{50 \% \& more}
  \begin{tabular}{lrr}
    \toprule
    Organ & \multicolumn{2}{c}{Both\_sites} \\
     & mean {\scriptsize $\pm$ SD} & n \\
    \midrule
    Liver & \textbf{0.9~$\pm$ 0.1 $\uparrow$$\bullet$} & 3 \\
    \multicolumn{3}{l}{a\textbackslash{}b} \\
    \midrule
    All & $-$0.5 & -- \\
    \bottomrule
  \end{tabular}
\end{table}
"""


def test_a_table_with_spans_small_print_and_a_best_value() -> None:
    assert latex_of(PAGE) == LATEX


def test_a_page_without_tables() -> None:
    assert latex_of("<p>none</p>") == ""
