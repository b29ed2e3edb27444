// pytest-html redraws its table at every click, so a row is looked up again after each. It shows the id of a test with
// xdist's @group after it, and with ::setup if the test did not get to run.
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
  // The front has its own headings. What pytest-html knows of the environment goes below what the gate does.
  document.querySelector('.summary__data > h2')?.remove()
  document.addEventListener('DOMContentLoaded', () => {  // pytest-html has bound the header by now
    const known = document.getElementById('environment')
    if (known) document.getElementById('probe-environment').append(known)
    document.getElementById('environment-header')?.remove()
    toStory()
  })
  window.addEventListener('hashchange', toStory)
})()
