"""The style and the script of the front of the report: inline, so that the report stays one file."""

from probe.report.gate.heat import shade_style

STYLE = (
    """
.probe{background:#fff;color:#1c2733;color-scheme:light;font:13px/1.45 "Segoe UI",Helvetica,Arial,sans-serif;
  max-width:1500px;padding:4px 0 12px}
.probe h3{font-size:16px;margin:22px 0 8px;color:#1c2733}
.probe h4{font-size:13px;margin:0 0 5px;color:#1c2733}
.probe h3 small,.probe h4 small{font-weight:normal;color:#5f6b7a;margin-left:6px}
.probe p{margin:8px 0;color:#1c2733}
.probe a{color:#0b5cad}
.probe .probe-bad{color:#b00020;font-weight:600}
.probe-chip{display:inline-block;margin:0 6px 6px 0;padding:3px 11px;border-radius:12px;background:#e8edf2;
  font-weight:600}
.probe-chip.passed,.probe-chip.updated{background:#dff2e3;color:#0b5b27}
.probe-chip.failed{background:#fbe1e4;color:#98001b}
.probe-note{background:#fff6dd;border-left:4px solid #d9a400;padding:6px 10px}
.probe-stories{max-height:1000px;overflow:auto;padding:3px}
.probe-story summary small{font-weight:normal;color:#5f6b7a;margin-left:10px}
.probe-story{margin:0 0 8px;border:1px solid #e3c4c8;border-left:4px solid #b00020;border-radius:4px;background:#fffafa}
.probe-story summary{padding:7px 10px;cursor:pointer;font-weight:600}
.probe-story pre{margin:0;padding:2px 12px 12px;overflow-x:auto;color:#1c2733;
  font:12px/1.5 "DejaVu Sans Mono",Menlo,Consolas,monospace}
.probe-story:target,.probe-story.here{box-shadow:0 0 0 3px #ffd24d}
.probe-legend span{display:inline-block;padding:1px 7px;margin-right:1px;font-size:11px}
.probe-legend span.off{margin-left:10px}
.probe-legend .bad{margin-left:10px}
.probe-maps{display:flex;flex-wrap:wrap;gap:18px 26px}
.probe-map{max-width:100%;min-width:0}
.probe-scroll{overflow-x:auto;max-width:100%}
.probe-heat{border-collapse:separate;border-spacing:1px;font-size:11px}
.probe-heat th{font-weight:normal;color:#45525f;padding:2px 5px;white-space:nowrap;max-width:110px;overflow:hidden;
  text-overflow:ellipsis;background:#fff}
.probe-heat tr>th:first-child{position:sticky;left:0;text-align:right;padding-right:8px;max-width:240px;z-index:1}
.probe-heat td{padding:0;min-width:50px;height:20px;text-align:center;white-space:nowrap}
.probe-heat td a{display:block;padding:2px 5px;color:inherit;text-decoration:none}
.probe-heat td a:hover,.probe-heat td a:focus-visible{outline:2px solid #111;outline-offset:-1px}
.probe .off{background:#e6e9ed;color:#5f6b7a}
.probe .whole{background:#f4f6f8;color:#1c2733}
.probe .bad{box-shadow:inset 0 0 0 3px #d0021b,inset 0 0 0 4px #fff;font-weight:700}
.probe-legend .bad{color:#98001b}
.probe-recipes{border-collapse:collapse}
.probe-tall{max-height:440px;overflow:auto;border:1px solid #dde2e8;border-radius:4px;display:inline-block;
  max-width:100%}
.probe-recipes th{position:sticky;top:0;background:#eef1f5;text-align:left;font-weight:600;z-index:1}
.probe-recipes th,.probe-recipes td{padding:4px 12px;border-bottom:1px solid #e8ecf0;white-space:nowrap}
.probe-recipes td.n{font-variant-numeric:tabular-nums}
.probe-recipes small{color:#5f6b7a;margin-left:5px}
.probe-recipes tr.failed td:first-child{box-shadow:inset 4px 0 #b00020}
.probe-environment td{padding:2px 14px 2px 0}
.probe-environment tr.moved td{background:#fff6dd}
#results-table .probe-figures{color:#1c2733;padding:4px 2px}
#results-table .probe-figures p{margin:2px 0 8px;overflow-wrap:anywhere}
#results-table .probe-figures table{border-collapse:collapse;font-size:12px}
#results-table .probe-figures th,#results-table .probe-figures td{padding:2px 14px 2px 6px;border:0;
  border-bottom:1px solid #e8ecf0;font-variant-numeric:tabular-nums}
#results-table .probe-figures tr.moved td{background:#fdecee;font-weight:600}
td.extra:has(.probe-figures) div.media{float:none;width:auto;height:auto;border:0;margin:8px 0}
td.extra:has(.probe-figures) .media-container,
td.extra:has(.probe-figures) .media-container__viewport{height:auto;text-align:left;cursor:default}
td.extra:has(.probe-figures) .media-container__viewport img{width:auto;max-width:100%;object-fit:contain}
td.extra:has(.probe-figures) .media:has(.media-container--fullscreen) .media__name,
td.extra:has(.probe-figures) .media:has(.media-container--fullscreen) .media__counter{display:none}
tbody.probe-here>tr.collapsible>td{background:#fff6dd}
""".strip()
    + shade_style()
)

#: pytest-html draws its table anew at every click, so that a row is looked up again after each. It shows the id of a
#: test with xdist's @group after it, and with ::setup where the test did not get to run.
SCRIPT = """
(() => {
  const nameOf = row => row.querySelector('.collapsible > .col-testId')?.textContent ?? ''
  const find = id => {
    const rows = [...document.querySelectorAll('#results-table > tbody')]
    return rows.find(row => nameOf(row) === id) ?? rows.find(row => {
      const name = nameOf(row)
      return name && (name.startsWith(id + '@') || name.startsWith(id + '::') || id.startsWith(name + '@'))
    })
  }
  const open = (id, status) => {
    let row = find(id)
    const boxes = [...document.querySelectorAll('input[data-test-result]')]
    const hiding = boxes.filter(box => !box.checked && !box.disabled)
    hiding.sort((a, b) => (b.dataset.testResult === status) - (a.dataset.testResult === status))
    for (const box of hiding) {
      if (row) break
      box.click()
      row = find(id)
    }
    if (row?.querySelector('.extras-row.hidden')) {
      row.querySelector('.collapsible > .col-result')?.click()
      row = find(id)
    }
    document.querySelectorAll('.probe-here').forEach(other => other.classList.remove('probe-here'))
    row?.classList.add('probe-here')
    const target = row ?? document.getElementById('results-table')
    target?.scrollIntoView()
  }
  const toStory = () => {
    let id = location.hash.slice(1)
    try { id = decodeURIComponent(id) } catch { return }
    const story = document.getElementById(id)
    if (!story?.classList.contains('probe-story')) return
    document.querySelectorAll('.probe-story.here').forEach(other => other.classList.remove('here'))
    story.classList.add('here')
    story.querySelectorAll('details').forEach(each => { each.open = true })
    story.open = true
    story.scrollIntoView()
  }
  document.addEventListener('click', event => {
    const cell = event.target.closest?.('[data-test]')
    if (cell) {
      event.preventDefault()
      open(cell.dataset.test, cell.dataset.status)
    }
    if (event.target.closest?.('td.extra:has(.probe-figures) .media img')) event.stopPropagation()  // no empty tab
  }, true)
  document.addEventListener('DOMContentLoaded', () => {
    document.getElementById('environment-header')?.click()  // what was run on is shown with the stories
    toStory()
  })
  window.addEventListener('hashchange', toStory)
})()
""".strip()
